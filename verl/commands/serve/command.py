"""`verl serve model=DIR`: an OpenAI-compatible server over a rollout engine, on loopback by default.

POST /v1/chat/completions, /v1/responses and /v1/completions, GET /v1/models, /v1/models/ID and /health.
Missing request fields default to rollout.*. A client that disconnects ends its request. docs/see/serving.md lists
the fields.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checks.findings import Findings
from verl.checks.machine import MODEL_KEY, check_model_place, check_rollout_engine
from verl.commands.serve.address import cannot_listen, check_address
from verl.config import RunConfig, load_config
from verl.config.load import pop_unread_keys
from verl.utils.errors import ConfigError, VerlError
from verl.utils.paths import model_name
from verl.utils.process_end import end_process, say_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.commands.serve.server import OpenAIServer

MODEL_PATH_KEY = "actor_rollout_ref.model.path"
KEY_VARIABLE = "VERL_API_KEY"
_LONGEST_KEY = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. 2: a mistake the message explains."""
    options = _parser().parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    aliases = {"model": MODEL_PATH_KEY}
    overrides = [f"{aliases.get(k, k)}{eq}{v}" for k, eq, v in (o.partition("=") for o in options.overrides)]
    overrides = [f"actor_rollout_ref.{o}" if o.startswith("rollout.") else o for o in overrides]
    try:
        return run_server(overrides, options)
    except VerlError as error:
        say_error(f"error: {error}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--name", help="model name clients ask for (default: of the experiment, else of the folder)")
    parser.add_argument("--api-key", help=f"key that clients must send (default: ${KEY_VARIABLE}, else none)")
    parser.add_argument("--api-key-file", help="file that holds the key, which then is in no list of processes")
    parser.add_argument("--max-concurrent", type=int, default=256, help="requests at once (default: %(default)s)")
    parser.add_argument("--max-body-mb", type=int, default=16, help="largest body in MiB (default: %(default)s)")
    parser.add_argument(
        "--client-timeout", type=float, default=30.0,
        help="seconds a client may take to send a request, or to read what is sent (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-sleep", action="store_true", help="answer POST /sleep and /wake_up, which free and fill the devices"
    )
    parser.add_argument("overrides", nargs="*", help=f"model=DIR ({MODEL_PATH_KEY}) and rollout.* keys")
    return parser


def run_server(overrides: list[str], options: argparse.Namespace) -> int:
    """Check everything, then serve until interrupted."""
    found = Findings("things keep the server from starting")  # that can be seen before heavy libraries are loaded
    found.check("options", lambda: check_options(options))
    found.check("address", lambda: check_address(options.host, options.port))
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        found.refusal("aiohttp", ConfigError("`verl serve` needs aiohttp: pip install -e '.[serve]'"))
    config = found.run("configuration", lambda: load_config(overrides))
    if config is not None:
        arr = config.actor_rollout_ref
        check_rollout_engine(arr, found)
        if arr.model.path:
            check_model_place(MODEL_KEY, arr.model, arr.actor.strategy, found)
        else:
            found.refusal(MODEL_KEY, ConfigError("no model is named; give its folder: verl serve model=DIR"))
    found.raise_refusals()
    assert config is not None  # without a refusal
    server = build_server(config, options)
    logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("verl.commands.serve").setLevel(logging.INFO)
    limit = f"at most {server.max_length} tokens a conversation"
    print(f"model {server.name}: {limit} (rollout.max_model_len)", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(server, options.host, options.port))
    except (OSError, OverflowError) as error:  # another program took the port while the model was loaded
        raise cannot_listen(options.host, options.port, error) from error
    return 0


def check_options(options: argparse.Namespace) -> None:
    """ConfigError for a limit that is none."""
    for name in ("max_concurrent", "max_body_mb", "client_timeout"):
        if not 0 < getattr(options, name) < 1e6:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)} must be above 0 and below 1000000")
    read_api_key(options)


def read_api_key(options: argparse.Namespace) -> str | None:
    """The key of --api-key, --api-key-file or the environment; ConfigError for an empty one, which would let all in."""
    source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if options.api_key is not None:
        source, key = "--api-key", options.api_key
    if options.api_key_file is not None:
        if options.api_key is not None:
            raise ConfigError("--api-key and --api-key-file both name a key; give one")
        source, path = f"--api-key-file {options.api_key_file}", Path(options.api_key_file).expanduser()
        if not path.is_file():  # a pipe could be waited for
            raise ConfigError(f"{source} is no file; name one with the key alone")
        try:
            with path.open() as file:
                key = file.read(_LONGEST_KEY + 2)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}; name a file with the key alone") from error
    if key is None:
        return None
    if not (key := key.strip()).isprintable() or not 0 < len(key) <= _LONGEST_KEY:
        raise ConfigError(
            f"{source} holds no key, which is one line of 1 to {_LONGEST_KEY} characters; give one, or leave it out to "
            "let everyone ask"
        )
    return key


async def _serve(server: "OpenAIServer", host: str, port: int) -> None:
    from verl.commands.serve.connections import listening, until_stopped

    async with listening(server.application(), host, port, server.limits.client_timeout_s) as bound:
        print(f"serving {server.name} on http://{host}:{bound}/v1", flush=True)
        print(f"try it:  {trial_command(server, host, bound)}", flush=True)
        await until_stopped()
        print("stopping", flush=True)


def trial_command(server: "OpenAIServer", host: str, port: int) -> str:
    """A curl command that asks the server one question; it does not show the key."""
    chats, text = server.tokenizer.chat_template is not None, "12+34="  # even a toy model has digits
    asked = {"messages": [{"role": "user", "content": text}]} if chats else {"prompt": text}
    words = ["-H", "Content-Type: application/json", "-d", json.dumps({"model": server.name, **asked})]
    here = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{here}]' if ':' in here else here}:{port}/v1/{'chat/' if chats else ''}completions"
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if server.limits.api_key else ""
    return f"curl {url}{key} {shlex.join(words)}"


def build_server(config: RunConfig, options: argparse.Namespace) -> "OpenAIServer":
    """The server of a configuration, with its engine started."""
    from verl.commands.serve.server import OpenAIServer, ServerLimits
    from verl.models.load import load_tokenizer
    from verl.trainer.ppo.rollout_setup import build_standalone_engine, training_sampling

    rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    max_length = rollout.max_model_len or _max_length(rollout.prompt_length + rollout.response_length, path)
    _check_model(config, tokenizer, max_length)
    limits = ServerLimits(
        read_api_key(options), options.max_concurrent, options.max_body_mb << 20, options.client_timeout,
        options.allow_sleep, options.host,
    )  # fmt: skip
    server = OpenAIServer(
        build_standalone_engine(config, tokenizer),
        tokenizer,
        options.name or model_name(Path(str(path))),
        max_length,
        training_sampling(rollout),
        config.data.apply_chat_template_kwargs,
        rollout.multi_turn.format,
        limits,
    )
    for key in pop_unread_keys(config):
        print(f"warning: {key} was set, but nothing reads it here", file=sys.stderr)
    return server


def _max_length(requested: int, path: str | None) -> int:
    """Tokens of a conversation: `requested`, or the positions of a local model if those are fewer."""
    from verl.models.load import load_config as load_model_config

    if not _is_model(path):
        return requested
    return min(requested, getattr(load_model_config(str(path)), "max_position_embeddings", None) or requested)


def _is_model(path: str | None) -> bool:
    """Whether the folder has a configuration; without one it is only a tokenizer, and another server runs the model."""
    from verl.models.model_place import find_folder

    folder = find_folder(str(path), "path")
    return folder is not None and (folder / "config.json").is_file()


def _check_model(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> None:
    """ConfigError, or a warning on stderr, where the model and its tokenizer do not go together, as before training."""
    from verl.models.folder_checks import check_model_for_run
    from verl.models.load import build_config, model_folder

    model, key = config.actor_rollout_ref.model, "actor_rollout_ref.rollout.max_model_len"
    if _is_model(model.path):
        folder = model_folder(model.path)
        for line in check_model_for_run(build_config(model)[0], folder, tokenizer, max_length, key):
            print(f"warning: {line}", file=sys.stderr)


if __name__ == "__main__":
    end_process(main)
