"""A GRPO step on a device that only a plug-in knows: neither "cuda" nor "cpu" to torch (tests/e2e/toaster)."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiers import soak

pytestmark = pytest.mark.slow

TOASTER = Path(__file__).parent / "toaster"
PROGRAM = """
    import sys
    from pathlib import Path
    from tests.e2e import jobs

    folder, run, *extra = sys.argv[1:]
    jobs.train(Path(folder), run, "trainer.total_training_steps=2", "trainer.save_freq=1", *extra)
"""
PPO = ["algorithm.adv_estimator=gae", "critic.fsdp.dtype=float32", "critic.optim.lr=1e-2"]
MIXED = "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"
OFFLOAD = [f"actor_rollout_ref.actor.fsdp_config.{part}_offload=True" for part in ("param", "optimizer")]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The device's library, built with the compiler (about 15 seconds)."""
    folder = Path(torch.__file__).parent
    target = tmp_path_factory.mktemp("toaster") / "toaster.so"
    places = [f"-I{folder}/include", f"-I{folder}/include/torch/csrc/api/include", f"-L{folder}/lib"]
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", *places, f"-Wl,-rpath,{folder}/lib"]
    command = ["g++", *options, str(TOASTER / "toaster.cpp"), "-o", str(target), "-lc10", "-ltorch_cpu", "-ltorch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def run(library, tmp_path):
    """Train for two steps on one device, in a process of its own; (metrics by step, output)."""
    from tests.e2e import jobs

    jobs.prepare(tmp_path)

    def train(name, on_toaster, *extra):
        paths = [str(Path(__file__).parents[2]), *([str(TOASTER)] if on_toaster else [])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VERL_FILE_LOGGER_ROOT": str(tmp_path / "metrics")}
        env |= {"OMP_NUM_THREADS": "1", "TOASTER_LIBRARY": str(library)}
        env |= {"VERL_USE_EXTERNAL_MODULES": "toaster_plugin" if on_toaster else ""}
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), name, *extra]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "don't support falling back" not in done.stderr, "the device lacks a view"
        rows = map(json.loads, (tmp_path / "metrics" / "e2e" / f"{name}.jsonl").read_text().splitlines())
        return {row["step"]: row["data"] for row in rows}, done.stdout + done.stderr

    return train


@pytest.mark.parametrize(
    "extra", [*soak([[], OFFLOAD]), PPO, [*OFFLOAD, MIXED]], ids=["grpo", "grpo-offload", "ppo", "grpo-bf16-offload"]
)
def test_steps_on_a_device_only_a_plug_in_knows_equal_those_on_the_cpu(run, tmp_path, extra):
    on_cpu, _ = run("cpu", False, *extra)
    on_toaster, output = run("toaster", True, *extra)
    assert "TOASTER engine: every parameter is on toaster:0" in output
    rounding, apart = (2e-2, 5e-3) if MIXED in extra else (1e-4, 1e-5)
    for step in (1, 2):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"):
            assert on_toaster[step][name] == pytest.approx(on_cpu[step][name], rel=rounding, abs=apart / 10), name
        assert on_toaster[step]["training/rollout_probs_diff_max"] < apart
    first, second = (
        load_file(next((tmp_path / "toaster" / f"global_step_{s}").rglob("model.safetensors"))) for s in (1, 2)
    )
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_the_second_step_after_a_resume_is_the_same(run):
    whole, _ = run("whole", True)
    run("parts", True, "trainer.total_training_steps=1")
    parts, _ = run("parts", True)
    assert parts[2]["actor/grad_norm"] == whole[2]["actor/grad_norm"]
    assert parts[2]["critic/score/mean"] == whole[2]["critic/score/mean"]


def test_doctor_finds_the_device_by_probing(library):
    env = {**os.environ, "PYTHONPATH": str(TOASTER), "TOASTER_LIBRARY": str(library)}
    env["VERL_USE_EXTERNAL_MODULES"] = "toaster_plugin"
    command = [sys.executable, "-m", "verl.commands.doctor", "--json"]
    report = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    platform = {row["name"]: row for row in report["platform"]}
    assert "acme: device toaster, backend gloo; detected: present" in platform["platform"]["detail"]
    backends = {row["name"]: row["status"] for row in report["backends"]}
    assert backends["fsdp2"] == "good" and backends["native"] == "good" and backends["megatron"] == "bad"
    assert backends["vllm"] == "note"  # nobody here knows what vLLM makes of that device
