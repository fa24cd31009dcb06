"""Overrides of the model's configuration reach every engine; log-probs that are not the policy's are refused."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from tests.rollout_adapters import CONFIG, EOS, PROMPT, letters_tokenizer, own_logprobs, small_model
from verl.checks.loaded import check_rollout_logprobs
from verl.config import ConfigError, HFModelConfig, load_config
from verl.models.load import build_config, load_causal_lm
from verl.trainer.ppo.rollout_setup import build_standalone_engine, copied_inputs
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.replica import NativeReplica
from verl.workers.rollout.sglang import command_line, sglang_arguments
from verl.workers.rollout.vllm.engine import vllm_arguments

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OVERRIDE = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rms_norm_eps": 0.5}
CHANGED = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "rms_norm_eps": 0.5}


@pytest.fixture
def model(tmp_path: Path) -> HFModelConfig:
    small_model().save_pretrained(tmp_path / "model")
    letters_tokenizer().save_pretrained(tmp_path / "model")
    return HFModelConfig(path=str(tmp_path / "model"), override_config=OVERRIDE)


def test_vllm_and_sglang_are_started_with_the_merged_values(model: HFModelConfig):
    config = copied_inputs(CONFIG, model, letters_tokenizer()).config
    assert vllm_arguments(config, "m")["hf_overrides"] == CHANGED
    argv = command_line(sglang_arguments(config, "m"))
    assert json.loads(argv[argv.index("--json-model-override-args") + 1]) == CHANGED
    plain = copied_inputs(CONFIG, HFModelConfig(path=model.path), letters_tokenizer())
    assert plain.config == CONFIG and plain.config_overrides == {}


def test_what_engine_kwargs_says_itself_goes_first(model: HFModelConfig):
    words = [f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides={{rms_norm_eps: 0.25}}"]
    words.append(f"+{ROLLOUT}.engine_kwargs.sglang.json_model_override_args='{{\"rms_norm_eps\": 0.125}}'")
    config = copied_inputs(load_config(words).actor_rollout_ref.rollout, model, letters_tokenizer()).config
    assert config.engine_kwargs.vllm["hf_overrides"] == {**CHANGED, "rms_norm_eps": 0.25}
    assert json.loads(config.engine_kwargs.sglang["json_model_override_args"]) == {**CHANGED, "rms_norm_eps": 0.125}


def test_a_native_replica_and_a_standalone_engine_compute_with_them(model: HFModelConfig):
    oracle = load_causal_lm(model.path or "", config=build_config(model)[0])
    inputs = copied_inputs(CONFIG, model, letters_tokenizer())
    replica = NativeReplica(inputs.config, model.path or "", letters_tokenizer(), (EOS,))
    asyncio.run(replica.update_weights(oracle, 0))
    config = load_config([f"{MODEL}.path={model.path}", f"+{MODEL}.override_config={json.dumps(OVERRIDE)}"])
    request = GenerationRequest(0, PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))
    for engine in (replica, build_standalone_engine(config, letters_tokenizer())):
        [answer] = asyncio.run(engine.generate(request))
        expected = own_logprobs(oracle, answer.token_ids)
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("server", [["name=tgi"], ["name=sglang"]])
def test_a_server_that_runs_already_and_would_answer_without_them_is_refused(server: list[str], model: HFModelConfig):
    words = [f"{ROLLOUT}.{word}" for word in [*server, "server.url=http://127.0.0.1:1", "server.python=python"]]
    words += [f"{MODEL}.path={model.path}", f"+{MODEL}.override_config.rms_norm_eps=0.5"]
    with pytest.raises(ConfigError, match=r"model.override_config=.* has no effect on a server that runs already"):
        build_standalone_engine(load_config(words), letters_tokenizer())


IS, BYPASS = "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.bypass_mode=True"
DRAFTS = f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config={{method: ngram}}"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["name=sglang", "min_tokens=3"], "min_tokens=3"),
        (["name=vllm", "logprobs_mode=raw_logprobs", "temperature=0.7"], "temperature=0.7"),
        (["name=vllm", "top_p=0.7", DRAFTS], "top_p=0.7"),
        (["name=vllm", "top_p=0.7", "top_k=3", "min_tokens=3", "temperature=0.7"], None),
        (["name=vllm", "logprobs_mode=raw_logprobs"], None),
        (["name=vllm", DRAFTS], None),
        (["name=sglang", "top_p=0.7", "top_k=3"], None),
        (["name=native", "top_p=0.7", "min_tokens=3"], None),
    ],
)
def test_log_probs_that_are_not_the_policys_are_refused_where_they_are_taken_for_them(
    words: list[str], wrong: str | None
):
    words = [word if word.startswith("+") else f"{ROLLOUT}.{word}" for word in words]
    check_rollout_logprobs(load_config(words))
    for correction in (IS, BYPASS):
        config = load_config([*words, correction])
        if wrong is None:
            check_rollout_logprobs(config)
        else:
            with pytest.raises(ConfigError, match=f"rollout.{wrong}: with it, the log-probs .* not the policy's"):
                check_rollout_logprobs(config)


def test_logits_are_no_log_probs():
    with pytest.raises(ConfigError, match=r"logprobs_mode=.*raw_logits.*processed_logprobs"):
        load_config([f"{ROLLOUT}.logprobs_mode=raw_logits"])
