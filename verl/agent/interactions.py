"""Interactions: user code that replies, as a user would, to an answer that calls no tool."""

import functools
import inspect
import uuid
from typing import Any

from verl.agent.tools import read_yaml
from verl.utils.errors import ConfigError, DataError
from verl.utils.external_code import load_object
from verl.utils.suggest import did_you_mean

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


class BaseInteraction:
    """One kind of user. An instance serves all conversations of a run; `instance_id` tells them apart."""

    def __init__(self, config: dict[str, Any]):
        self.config, self.name = config, str(config.get("name", "interaction_agent"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation; `kwargs` are the `interaction_kwargs` of the row's extra_info."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the conversation ends, the user's reply, score of the policy's turn, anything)."""
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Score of the conversation so far, for code of your own."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End a conversation."""


@functools.cache
def load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    """The interactions by name of a YAML file with a list of `name`, `class_name` and `config` below `interaction`."""
    if path is None:
        return {}
    raw, made = read_yaml(path, KEY), {}
    entries = raw.get("interaction") if isinstance(raw, dict) else None
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "class_name" in e for e in entries):
        raise ConfigError(f"{KEY}={path}: expected a list under `interaction`, of {{class_name: …, name: …}}")
    for entry in entries:
        module, _, kind = str(entry["class_name"]).rpartition(".")
        name = str(entry.get("name") or kind.removesuffix("Interaction").lower())
        cls = load_object(f"pkg://{module}", kind, f"{path}: class_name")
        if not (isinstance(cls, type) and issubclass(cls, BaseInteraction)):
            raise ConfigError(
                f"{path}: class_name={entry['class_name']!r} is no verl.interactions.base.BaseInteraction"
            )
        if name in made:
            raise ConfigError(f"{path}: two interactions are called {name!r}; give one another name")
        made[name] = cls({**(entry.get("config") or {}), "name": name})
    return made


class Conversation:
    """The interaction of one conversation, as its row names it."""

    def __init__(self, interaction: BaseInteraction, instance_id: str, kwargs: dict[str, Any]):
        self.interaction, self.instance_id, self.kwargs = interaction, instance_id, kwargs
        self.scores: list[float] = []

    async def reply(self, messages: list[Any]) -> str | None:
        """The user's reply to the last message; None where the conversation ends."""
        result = await self.interaction.generate_response(self.instance_id, messages, **self.kwargs)
        if not (isinstance(result, tuple) and len(result) == 4 and isinstance(result[1], str)):
            raise DataError(f"generate_response returned {result!r:.200}; return (ends, reply, score, dictionary)")
        if result[2] is not None:
            self.scores.append(float(result[2]))
        return None if result[0] else result[1]

    async def close(self) -> None:
        """End it. Older interactions take no instance."""
        end = self.interaction.finalize_interaction
        await end(*[self.instance_id] * (len(inspect.signature(end).parameters) > 0))


async def start_conversation(path: str | None, extra_info: dict[str, Any], instance_id: str) -> Conversation | None:
    """The conversation of a row with `interaction_kwargs`; None for another row. DataError for an unknown name."""
    known, kwargs = load_interactions(path), dict(extra_info.get("interaction_kwargs") or {})
    if not known or not kwargs:
        return None
    name = str(kwargs.get("name") or next(iter(known)))
    if name not in known:
        raise DataError(f"interaction_kwargs: the name {name!r} is not in {path}; {did_you_mean(name, known)}")
    await known[name].start_interaction(instance_id, **kwargs)
    return Conversation(known[name], instance_id, kwargs)
