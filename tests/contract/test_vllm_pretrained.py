"""A real pretrained model under the real vLLM: trained with a receipt, saved, and loaded again."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.conftest import skip_without_vllm
from tests.pretrained import QUESTIONS, assert_saved_as_published, ids_of, logprobs_alone, train_two_steps
from verl.config.rollout import RolloutConfig
from verl.workers.rollout.vllm.engine import VLLMEngine

pytestmark = pytest.mark.vllm
ROLLOUT = "actor_rollout_ref.rollout"
KV_CACHE = 1 << 26
VLLM = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enforce_eager=True", f"{ROLLOUT}.kv_cache_bytes={KV_CACHE}"]


def test_two_steps_are_received_match_and_vllm_loads_what_was_saved(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
):
    skip_without_vllm()
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    rows = train_two_steps(tmp_path, smollm2, "vllm", *VLLM, f"{ROLLOUT}.checkpoint_engine.probe_every=1")
    for step in (1, 2):
        assert rows[step]["weight_sync/tensors_read_back"] == rows[step]["weight_sync/tensors_sent"] > 0
        assert rows[step]["weight_sync/parameters_not_read_back"] == 0
        assert rows[step]["weight_sync/probe_difference"] <= rows[step]["weight_sync/probe_bound"]
        assert rows[step]["training/rollout_probs_diff_max"] < 1e-4
    last = assert_saved_as_published(tmp_path / "vllm" / "run", smollm2)
    saved = tmp_path / "vllm" / "run" / "global_step_2" / "actor" / "huggingface"
    config = replace(
        RolloutConfig(dtype="float32", prompt_length=64, response_length=8, max_num_seqs=4),
        name="vllm", load_format="auto", enforce_eager=True, kv_cache_bytes=KV_CACHE,
    )  # fmt: skip
    engine = VLLMEngine(config, saved, AutoTokenizer.from_pretrained(saved))
    try:
        ids = ids_of(saved, QUESTIONS[0])
        told = torch.tensor(asyncio.run(engine.compute_logprobs([ids]))[0][1:])
        torch.testing.assert_close(told, logprobs_alone(last, torch.tensor(ids))[1:], rtol=0, atol=1e-3)
    finally:
        engine.close()
