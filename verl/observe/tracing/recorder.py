"""Traces of the conversations of a run: which are recorded, what is in them, and when they are written."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from verl.data.trajectory import FIRST_VALIDATION_GROUP, Trajectory
from verl.observe.tracing.spans import CONVERSATION, GENERATION, LOGPROBS, REWARD, TOKEN_IDS, Span, ended
from verl.observe.tracing.writer import TraceWriter

Decode = Callable[[list[int]], str]
MAX_UNSCORED = 1 << 16  # groups that may wait for their rewards; of those that were given up, the oldest go


@dataclass
class _Conversation:
    """One that was recorded and waits for its rewards, and the number of trajectories that it became."""

    root: Span
    size: int = 1


class TracedPrompt:
    """The conversations about one prompt, which is traced."""

    def __init__(self, recorder: "TraceRecorder", group_id: int, inputs: dict[str, Any], attributes: dict[str, Any]):
        self.recorder, self.group_id, self.inputs, self.attributes = recorder, group_id, inputs, attributes
        self.start_ns = time.time_ns()
        self.conversations: dict[int, _Conversation] = {}  # by sample

    @contextmanager
    def conversation(self, name: str, sample: int) -> Iterator[_Conversation]:
        """Records a conversation; a failed one is written with its error, since it gets no reward."""
        root = self._root(name, sample)
        found = _Conversation(root)
        try:
            with ended(root):
                yield found
        except Exception:
            self.recorder.write(root)
            raise
        self.conversations[sample] = found

    def answered(self) -> None:
        """All conversations are over: they wait for their rewards."""
        self.recorder.keep(self.group_id, [self.conversations[sample] for sample in sorted(self.conversations)])

    def add_single_turns(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Answers of one request, each a conversation of one turn that began with this prompt."""
        for sample, trajectory in enumerate(trajectories):
            root = self._root(name, sample)
            turn = Span("generate", GENERATION, start_ns=self.start_ns)
            at = trajectory.prompt_length
            fill_turn(
                turn, at, trajectory.response_ids, trajectory.rollout_logprobs[at:].tolist(),
                trajectory.stop_reason, trajectory.policy_version,
            )  # fmt: skip
            root.children.append(turn)
            turn.end()
            root.end()
            self.conversations[sample] = _Conversation(root)

    def _root(self, name: str, sample: int) -> Span:
        attributes = {**self.attributes, "sample": sample}
        return Span(name, CONVERSATION, self.inputs, {}, attributes, self.start_ns)


class TraceRecorder:
    """Records the conversations of at most `max_prompts` prompts a step (None: of all) and hands them to `writer`.

    With `with_tokens`, each turn has its token ids, their texts by `decode` and their log-probs. A step is that of the
    weights which are published when a prompt is sent; validations are counted apart.
    """

    def __init__(self, writer: TraceWriter, decode: Decode, with_tokens: bool = False, max_prompts: int | None = None):
        self.writer, self.decode, self.with_tokens, self.max_prompts = writer, decode, with_tokens, max_prompts
        self._open: dict[int, list[_Conversation]] = {}  # by group
        self._step, self._counted = {False: -1, True: -1}, {False: 0, True: 0}  # training, validation

    def prompt(
        self, group_id: int, version: int, inputs: dict[str, Any], attributes: dict[str, Any]
    ) -> TracedPrompt | None:
        """The trace of a prompt that is sent now, to the weights `version`; None where it is not recorded."""
        if group_id < 0:  # greedy answers, for a baseline
            return None
        validate = group_id >= FIRST_VALIDATION_GROUP
        step = version if validate else version + 1
        if step != self._step[validate]:
            self._step[validate], self._counted[validate] = step, 0
        if self.max_prompts is not None and self._counted[validate] >= self.max_prompts:
            return None
        self._counted[validate] += 1
        attributes = {"step": step, "validate": validate, "group": group_id, **attributes}
        return TracedPrompt(self, group_id, inputs, attributes)

    def keep(self, group_id: int, conversations: list[_Conversation]) -> None:
        """Until their rewards are there."""
        self._open[group_id] = conversations
        if len(self._open) > MAX_UNSCORED:
            del self._open[next(iter(self._open))]

    def scored(self, trajectories: Sequence[Trajectory], errors: Sequence[str | None], start_ns: int) -> None:
        """The scored `trajectories` of one group, in order: its conversations are written. Scoring began at `start_ns`;
        `errors` has what failed in it."""
        found = self._open.pop(trajectories[0].group_id, []) if trajectories else []
        scores = iter(zip(trajectories, errors, strict=True))
        for conversation in found:
            results = []
            for trajectory, error in islice(scores, conversation.size):
                results.append(_outcome(trajectory))
                outputs = {"reward": trajectory.reward, **trajectory.score_parts}
                reward = Span("reward", REWARD, outputs=outputs, start_ns=start_ns, error=error or "")
                reward.end()
                conversation.root.children.append(reward)
                self._describe(conversation.root, trajectory)
            conversation.root.note(outputs=results[0] if len(results) == 1 else {"trajectories": results})
            conversation.root.end()
            self.write(conversation.root)

    def write(self, root: Span) -> None:
        """Hand a complete trace over; the tokens of its turns become text."""
        for turn in root.walk():
            ids = turn.outputs.get(TOKEN_IDS) if turn.kind == GENERATION else None
            if ids is None:
                continue
            outputs = {"text": self.decode(ids), **turn.outputs}
            if self.with_tokens:
                outputs["tokens"] = [self.decode([token]) for token in ids]
            else:
                del outputs[TOKEN_IDS], outputs[LOGPROBS]
            turn.note(outputs=outputs)
        self.writer.put(root)

    def close(self) -> None:
        """Write what is under way, and say what was not written."""
        self._open = {}
        self.writer.close()

    def _describe(self, root: Span, trajectory: Trajectory) -> None:
        oldest, newest = trajectory.policy_version
        attributes = {
            "policy_version_min": min(oldest, root.attributes.get("policy_version_min", oldest)),
            "policy_version_max": max(newest, root.attributes.get("policy_version_max", newest)),
            "prompt_tokens": trajectory.prompt_length,
            "response_tokens": len(trajectory.tokens) - trajectory.prompt_length,
            "sampled_tokens": trajectory.num_sampled,
        }
        root.note(attributes=attributes)


def fill_turn(
    turn: Span,
    prompt_tokens: int,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    stop_reason: str | None,
    versions: tuple[int, int],
) -> None:
    """The policy's input and output of one turn; `versions` are the oldest and newest weights that sampled it."""
    oldest, newest = versions
    turn.note(
        inputs={"prompt_tokens": prompt_tokens},
        outputs={TOKEN_IDS: list(token_ids), LOGPROBS: list(logprobs)},
        attributes={
            "sampled_tokens": len(token_ids), "stop_reason": stop_reason,
            "policy_version_min": oldest, "policy_version_max": newest,
        },
    )  # fmt: skip


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "response": trajectory.response_text,
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "num_turns": trajectory.num_turns,
    }
