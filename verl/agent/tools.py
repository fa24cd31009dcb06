"""Tools a policy may call: classes with a schema, or plain functions. A failing tool gives an error reply."""

import asyncio
import contextlib
import contextvars
import inspect
import json
import logging
import math
import threading
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import yaml

from verl.agent.tool_schemas import OpenAIFunctionToolSchema
from verl.config.bounded_yaml import BoundedYAMLLoader
from verl.config.special_files import refuse_special
from verl.observe.tracing.spans import TOOL, span
from verl.utils.errors import ConfigError, VerlError
from verl.utils.external_code import load_module, load_object, user_traceback
from verl.utils.paths import expand_home
from verl.utils.suggest import did_you_mean

logger = logging.getLogger(__name__)

POLL_S = 0.5  # how often a running call is looked at
DEFAULT_TIMEOUT = 60.0  # seconds one call may take
_SAID = "_said"  # attribute of a tool with what is said of it already; it may not be hashable


@dataclass
class ToolResponse:
    """Reply of a tool: text for the conversation; images and videos are for multimodal policies."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    failure: str | None = None  # why the tool failed, where this is the reply that says so

    def is_empty(self) -> bool:
        """Whether there is no text, image or video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether there is text and nothing else."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """One tool. Override `execute`, and `create`, `calc_reward` and `release` where a call needs them."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema shown to the policy."""
        if getattr(self, "tool_schema", None) is None:
            raise ConfigError(f"{type(self).__name__} has no tool_schema; give one in the tool file or override this")
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a call; `kwargs` has the `create_kwargs` of the row's tools_kwargs."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run the call: response, reward of this call, metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Reward for the tool's current state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the call."""


class FunctionTool(BaseTool):
    """A plain or async function as a tool."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None,
        schema: OpenAIFunctionToolSchema | dict[str, Any] | None,
        timeout: float | None,
    ):
        self.function = function
        raw = schema or function_schema(function, name)
        config = {} if timeout is None else {"timeout": timeout}
        super().__init__(config, OpenAIFunctionToolSchema.model_validate(raw))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**parameters)
        else:
            result = await run_in_thread(self.function, parameters)
        return read_result(result)


async def run_in_thread(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Result of `function(**parameters)`, run in its own thread, so that neither other calls nor the end of the run
    wait for a hanging call."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def set_outcome(outcome: tuple[Any, BaseException | None]) -> None:
        if not future.done():
            future.set_result(outcome)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = context.run(function, **parameters), None
        except BaseException as error:  # a tool may call sys.exit()
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and nobody waits
            loop.call_soon_threadsafe(set_outcome, outcome)

    threading.Thread(target=work, name="tool", daemon=True).start()
    result, error = await future
    if error is not None:
        raise error
    return result


def read_result(result: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """(response, reward, metrics) of what a tool returned; ValueError says what is wrong with it."""
    if not isinstance(result, tuple):
        result = (result if isinstance(result, ToolResponse) else str(result), None)
    if not 2 <= len(result) <= 3 or not isinstance(result[0], str | ToolResponse):
        raise ValueError(
            f"it returned {result!r:.200}; a tuple must be (response, reward) or (response, reward, metrics), with a "
            "text or a ToolResponse as its response"
        )
    response, reward, metrics = (*result, None)[:3]
    response = ToolResponse(text=response) if isinstance(response, str) else response
    if response.image or response.video:
        raise ValueError("it returned images or videos; only text is supported so far")
    if not math.isfinite(reward := float(0.0 if reward is None else reward)):
        raise ValueError(f"its reward is {reward}; it must be finite")
    return response, reward, dict(metrics or {})


def function_schema(function: Callable[..., Any], name: str | None) -> dict[str, Any]:
    """Schema of a function, from its type hints and the Google-style `Args:` of its docstring."""
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"@function_tool on {function.__name__}: {error}; give every argument a type hint and a line under Args:, "
            "or pass schema=…"
        ) from error
    if name is not None:
        schema["function"]["name"] = name
    return schema


_registered_functions: dict[tuple[str, str], FunctionTool] = {}  # by module and name


def function_tool(
    name: str | Callable[..., Any] | None = None,
    *,
    schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """`@function_tool`, `@function_tool("name")`, `@function_tool(schema=…, timeout=…)`: register a function as a tool.

    `schema`: an OpenAIFunctionToolSchema or its dictionary. The function returns text, a ToolResponse, or a tuple
    (response, reward[, metrics]); the reply of any other object is its `str`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        tool = FunctionTool(function, name if isinstance(name, str) else None, schema, timeout)
        key = (function.__module__, tool.name)
        other = _registered_functions.get(key)
        if other is not None and other.function is not function:
            raise ConfigError(f"two function tools are called {tool.name!r}; give one another name")
        _registered_functions[key] = tool
        return function

    return register(name) if callable(name) else register


def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, BaseTool]:
    """The tools of a YAML file (`multi_turn.tool_config_path`) and of a Python file (`function_tool_path`), by name."""
    tools: dict[str, BaseTool] = {}
    loaded: list[BaseTool] = []
    if tool_config_path:
        loaded += _tools_from_yaml(tool_config_path)
    if function_tool_path:
        key = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
        module = load_module(function_tool_path, key)
        module_tools = [tool for (name, _), tool in _registered_functions.items() if name == module.__name__]
        if not module_tools:
            raise ConfigError(f"{key}={function_tool_path}: no function there is marked @function_tool")
        loaded += module_tools
    for tool in loaded:
        timeout = tool.config.get("timeout", DEFAULT_TIMEOUT)
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(f"tool {tool.name}: timeout={timeout!r} must be a number of seconds above 0")
        if tool.name in tools:
            raise ConfigError(f"two tools are called {tool.name!r}; a policy could not tell them apart")
        tools[tool.name] = tool
    return tools


def read_yaml(path: str, config_key: str) -> Any:
    """Content of the YAML file `path`, which is the value of `config_key`; its errors name both."""
    try:
        loader = BoundedYAMLLoader(
            refuse_special(expand_home(path, config_key), config_key).read_text(encoding="utf-8")
        )
        loader.name = f"{config_key}={path}"
        return loader.get_single_data()
    except OSError as error:
        raise ConfigError(f"{config_key}={path}: {error.strerror}; give a YAML file") from error
    except (yaml.YAMLError, ValueError) as error:  # an impossible date is a ValueError
        raise ConfigError(f"{config_key}={path} is not YAML: {error}") from error


def _tools_from_yaml(path: str) -> list[BaseTool]:
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    raw = read_yaml(path, key)
    entries = raw.get("tools") if isinstance(raw, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            f"{key}={path}: expected a list under `tools`, of {{class_name: …, config: …, tool_schema: …}}"
        )
    tools: list[BaseTool] = []
    for entry in entries:
        config, name = entry.get("config") or {}, str(entry.get("class_name", ""))
        if not isinstance(config, dict):
            raise ConfigError(f"{path}: config={config!r} of {name} must be a mapping")
        if config.get("type", "native") != "native":
            raise ConfigError(f"{path}: tool type {config['type']!r} is unknown; only native tools are supported")
        module, _, kind = name.rpartition(".")
        if not module:
            raise ConfigError(f"{path}: class_name={name!r} must be a dotted path such as my_package.my_tools.Search")
        cls = load_object(f"pkg://{module}", kind, f"{path}: class_name")
        schema = OpenAIFunctionToolSchema.model_validate(entry["tool_schema"]) if entry.get("tool_schema") else None
        try:
            tools.append(cls(config, schema))
        except VerlError:
            raise
        except Exception as error:
            raise ConfigError(f"{path}: {name}(config, tool_schema) failed:\n{user_traceback(error)}") from error
        if not isinstance(tools[-1], BaseTool):
            raise ConfigError(f"{path}: class_name={name!r} is not a verl.tools.base_tool.BaseTool")
    return tools


async def call_tool(
    tools: dict[str, BaseTool], name: str, arguments: str, create_kwargs: dict[str, Any], agent_data: Any = None
) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Run one tool call. Unknown tools, bad arguments, failures and timeouts become error replies with reward 0.

    The response to a call whose tool raised or took too long says so as its `failure`.
    """
    with span(name, TOOL, arguments=arguments) as traced:
        outcome = await _answered_call(tools, name, arguments, create_kwargs, agent_data)
        if traced is not None:
            response, reward, metrics = outcome
            traced.outputs = {"response": response.text, "reward": reward, **metrics}
    return outcome


async def _answered_call(
    tools: dict[str, BaseTool], name: str, arguments: str, create_kwargs: dict[str, Any], agent_data: Any
) -> tuple[ToolResponse, float, dict[str, Any]]:
    if name not in tools:
        return ToolResponse(text=f"Error: there is no tool {name!r}; {did_you_mean(name, tools)}"), 0.0, {}
    try:
        parameters = json.loads(arguments) if arguments.strip() else {}
        if not isinstance(parameters, dict):
            raise ValueError(f"expected an object, found {type(parameters).__name__}")
    except (ValueError, RecursionError) as error:
        return ToolResponse(text=f"Error: the arguments of {name} are not valid JSON: {error}"), 0.0, {}
    tool = tools[name]
    seconds = float(tool.config.get("timeout", DEFAULT_TIMEOUT))
    try:
        result, failure = await _within(seconds, _tool_outcome(tool, create_kwargs, parameters, agent_data))
        if failure is not None:
            raise failure
        return read_result(result)
    except _TooSlowError:
        _say_once(
            tool, "slow", f"tool {name} took longer than its timeout of {seconds:g} seconds with the arguments "
            f"{arguments:.200}; the policy gets that as the reply. The tool's `timeout` is the limit; this is said once"
        )  # fmt: skip
        failure = f"took longer than {seconds:g} seconds"
        return ToolResponse(text=f"Error: {name} {failure}", failure=failure), 0.0, {}
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
            raise  # the run is over
        failure = user_traceback(error, frames=0).strip().splitlines()[-1].strip()
        _say_once(
            tool, "raised", f"tool {name} failed with the arguments {arguments:.200}; the policy gets the last line as "
            f"the reply. tool_errors/{name} counts such calls; this is said once:\n{user_traceback(error)}"
        )  # fmt: skip
        return ToolResponse(text=f"Error when executing {name}: {failure}", failure=failure), 0.0, {}


def _say_once(tool: BaseTool, what: str, text: str) -> None:
    if what not in (said := vars(tool).setdefault(_SAID, set())):
        said.add(what)
        logger.warning("%s", text)


class _TooSlowError(Exception):
    """A tool call took longer than its limit."""


async def _tool_outcome(
    tool: BaseTool, create_kwargs: dict[str, Any], parameters: dict[str, Any], agent_data: Any
) -> tuple[Any, BaseException | None]:
    """(what the tool returned, None), or (None, what it raised): in a task of its own SystemExit would end the run."""
    try:
        instance, _ = await tool.create(create_kwargs=create_kwargs)
        try:
            return await tool.execute(instance, parameters, agent_data=agent_data), None
        finally:
            await tool.release(instance)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return None, error


async def _within(seconds: float, call: Coroutine[Any, Any, Any]) -> Any:
    """The call's result within so many seconds, counted in polls: time in which the process is stopped is not its."""
    task, step, used_s = asyncio.ensure_future(call), min(POLL_S, seconds / 4), 0.0
    try:
        while not task.done() and used_s < seconds:
            await asyncio.wait({task}, timeout=step)
            used_s += step
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=seconds)  # its release
            raise _TooSlowError
        return task.result()
    finally:
        task.cancel()


def truncate_text(text: str, limit: int, side: str) -> str:
    """`text` cut to `limit` characters on the left, in the middle or on the right; a mark shows the cut."""
    if len(text) <= limit:
        return text
    mark = "...(truncated)..."
    if side == "left":
        return mark + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + mark
    head = limit // 2
    return text[:head] + mark + text[len(text) - (limit - head) :]
