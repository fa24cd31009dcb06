"""GRPO with the tool agent on the native engine: what it sampled is what is trained, and failing tools stop nothing.

The model is random. Its vocabulary holds whole tool calls as single tokens, so that it calls tools from the start.
"""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.e2e import jobs
from tests.e2e.test_async_runs import assert_old_logprobs_of_each_version
from verl.commands.quickstart.small_model import small_qwen3
from verl.observe.ledger import read_ledger
from verl.workers.rollout.base import Completion, GenerationRequest
from verl.workers.rollout.native.engine import NativeEngine

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gsm8k_multiturn_w_tool"
PAD, END, ASSISTANT, TOOL = "<pad>", "<end>", "<assistant>", "<tool>"
REPLIES = {  # a call -> the word its reply must hold
    '{"name": "calculator", "arguments": {"expression": "40+2"}}': "42",
    '{"name": "calculator", "arguments": {"expression": "1/0"}}': "ZeroDivisionError",
    '{"name": "abacus", "arguments": {}}': "no",  # there is no tool 'abacus'
    '{"name": "calculator", "arguments": {"expression": 4': "valid",  # not valid JSON
}
CALLS = [f"<tool_call>{call}</tool_call>" for call in REPLIES]
WORDS = ["42", "ZeroDivisionError", "no", "valid", "Error", "8", "-"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content }}<end>"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float("42" in solution_str)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    vocabulary = {token: i for i, token in enumerate([PAD, END, ASSISTANT, TOOL, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=PAD)
    tokenizer.add_special_tokens({"additional_special_tokens": [ASSISTANT, TOOL]})
    tokenizer.add_tokens(CALLS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    small_qwen3(tokenizer, 1, hidden=32, layers=1, positions=4096).save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[tuple, list[float]]:
    """Log-probs of every answer of the native engine, by version of the weights, prompt and answer."""
    seen: dict[tuple, list[float]] = {}
    original = NativeEngine.generate

    async def recorded(engine: NativeEngine, request: GenerationRequest) -> list[Completion]:
        completions = await original(engine, request)
        for made in completions:
            seen[made.policy_version[0], tuple(request.prompt_ids), tuple(made.token_ids)] = made.logprobs
        return completions

    monkeypatch.setattr(NativeEngine, "generate", recorded)
    return seen


STEPS = 4
TURN = f"{jobs.ARR}.rollout.multi_turn"
SETTINGS = [
    f"{TURN}.enable=True",
    f"{TURN}.format=hermes",
    f"{TURN}.function_tool_path={EXAMPLE / 'tools.py'}",
    f"{TURN}.max_assistant_turns=4",
    f"{TURN}.max_parallel_calls=2",
    "data.max_response_length=96",
    f"{jobs.ARR}.rollout.n=8",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=False",
    "trainer.save_freq=4",
]


def test_grpo_trains_exactly_what_was_sampled_and_survives_failing_tools(folder: Path, sampled: dict):
    jobs.train(folder, "run", *SETTINGS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    said: Counter[str] = Counter()
    spoken = 0
    for step in range(1, STEPS + 1):
        batch = read_ledger(folder / "run" / "ledger", step).batch
        for version, tokens, mask, logprobs in sequences(batch):
            for start, end in spans(mask):  # the tokens before were the engine's prompt, the span is its whole answer
                assert logprobs[start:end] == sampled[version, tuple(tokens[:start]), tuple(tokens[start:end])]
                spoken += 1
            said.update(check_replies(tokenizer, tokens, mask))
    assert spoken > STEPS * 4 * 8
    assert set(said) == set(REPLIES) and min(said.values()) > 3, said
    rows = jobs.metrics(folder, "run")
    assert all(rows[step]["training/rollout_probs_diff_max"] < 1e-5 for step in range(1, STEPS + 1))
    assert max(rows[step]["num_turns/max"] for step in range(1, STEPS + 1)) == 8
    saved = load_file(folder / "run" / "global_step_4" / "actor" / "huggingface" / "model.safetensors")
    before = load_file(folder / "model" / "model.safetensors")
    assert all(not torch.equal(saved[name], before[name]) for name in before)


def test_tools_are_called_while_the_policy_is_trained(folder: Path):
    """Conversations go on beside the updates, also over a publish; each turn follows from the one before."""
    apart = ["trainer.device=cpu", f"{jobs.ARR}.hybrid_engine=False", f"{jobs.ARR}.rollout.n_gpus_per_node=2"]
    jobs.train(folder, "run", *SETTINGS, *apart, "trainer.v1.trainer_mode=separate_async")
    tokenizer, said, stale = PreTrainedTokenizerFast.from_pretrained(folder / "model"), Counter[str](), 0
    for step in range(1, STEPS + 1):
        batch = read_ledger(folder / "run" / "ledger", step).batch
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            tokens, mask = (batch[name][start:end].tolist() for name in ("tokens", "loss_mask"))
            said.update(check_replies(tokenizer, tokens, mask))
        stale += int((batch["policy_versions"][:, 0] < step - 1).sum())
    assert set(said) == set(REPLIES) and stale > 0


APART = ["trainer.device=cpu", f"{jobs.ARR}.hybrid_engine=False", f"{jobs.ARR}.rollout.n_gpus_per_node=1"]
MODES = {
    "colocated": ["trainer.v1.trainer_mode=colocate_async"],
    "apart": [*APART, "trainer.v1.trainer_mode=separate_async"],
}


@pytest.mark.parametrize("mode", MODES)
def test_the_turns_of_a_conversation_are_scored_by_the_versions_that_sampled_them(folder: Path, mode: str):
    """With top_p the rollout's log-probs are not used, and a conversation goes on over several versions."""
    how = [f"{jobs.ARR}.rollout.top_p=0.95", f"{jobs.ARR}.rollout.n=4", f"{jobs.ARR}.rollout.max_num_seqs=4"]
    how += ["trainer.save_freq=1", "trainer.test_freq=-1", "async_training.staleness_threshold=1.5"]
    jobs.train(folder, "run", *SETTINGS, *MODES[mode], *how)
    assert_old_logprobs_of_each_version(folder, "run", steps=range(2, STEPS + 1), mixed=mode == "colocated")
    turns = 0
    for step in range(2, STEPS + 1):
        batch = read_ledger(folder / "run" / "ledger", step).batch
        for (oldest, newest), (start, end) in zip(
            batch["policy_versions"].tolist(), pairwise(batch.cu_seqlens.tolist()), strict=True
        ):
            turns += len(spans(batch["loss_mask"][start:end].tolist())) > 1 and newest > oldest
    assert turns > 0 or mode == "apart"  # where it is left to time


def sequences(batch):
    """(version of the weights, tokens, mask, log-probs) of every trajectory."""
    bounds = batch.cu_seqlens.tolist()
    for (oldest, newest), (start, end) in zip(batch["policy_versions"].tolist(), pairwise(bounds), strict=True):
        assert oldest == newest
        yield oldest, *(batch[name][start:end].tolist() for name in ("tokens", "loss_mask", "rollout_logprobs"))


def spans(mask: list[bool]) -> list[tuple[int, int]]:
    """The runs of True."""
    return [m.span() for m in re.finditer("1+", "".join(str(int(value)) for value in mask))]


def check_replies(tokenizer, tokens: list[int], mask: list[bool]) -> list[str]:
    """Between two trained spans stand the replies to the calls of the first, and nothing else; returns those calls."""
    answered = []
    found = spans(mask)
    for (start, end), (later, _) in pairwise(found):
        inner = re.findall(r"<tool_call>(.*?)</tool_call>", tokenizer.decode(tokens[start:end]))[:2]
        between = tokenizer.convert_ids_to_tokens(tokens[end:later])
        assert between[0] == TOOL and between[-1] == ASSISTANT and between.count(TOOL) == len(inner)
        replies = "\n".join(between[1:-1]).split(TOOL)
        for call, reply in zip(inner, replies, strict=True):
            assert REPLIES[call] in reply.split("\n")
        answered += inner
    return answered
