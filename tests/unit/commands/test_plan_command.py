"""`verl plan` through its command line: nothing starts, and what cannot work is refused."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen3Config

from tests.conftest import ROOT
from verl import cli
from verl.commands.plan import planning
from verl.config import load_config

ROLLOUT = "actor_rollout_ref.rollout"
TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=vllm"]


def save_8b(folder: Path) -> Path:
    """The config.json of the shape of Qwen3-8B, without weights."""
    Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture
def model(tmp_path: Path) -> str:
    return f"actor_rollout_ref.model.path={save_8b(tmp_path / 'qwen3_8b')}"


def plan(*words: str) -> int:
    return cli.main(["plan", *words])


def test_two_machines_are_planned_on_a_laptop_from_a_configuration_alone(
    model: str, capsys: pytest.CaptureFixture[str]
):
    assert plan("--placement", *TWO_NODES, model, f"{ROLLOUT}.tensor_model_parallel_size=2") == 0
    out = capsys.readouterr().out
    assert "16 devices (GPU) on 2 machines" in out and "1     GPU 0-7  ranks 8-15  replicas 4-7 of 2" in out
    assert "actor: parameters           2.05" in out and "memory: estimates;" in out  # 8.19e9 x 4 bytes / 16


def on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(
        device_name="cuda", device_count=lambda: 1, is_available=lambda: True, total_memory=lambda: 40 * 10**9
    )
    monkeypatch.setattr(planning, "get_platform", lambda: here)


def test_more_devices_than_this_machine_has_are_planned(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    on_one_gpu(monkeypatch)
    vllm = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=vllm"]
    assert plan("trainer.n_gpus_per_node=8", *vllm) == 0
    assert "8 devices (cuda) on 1 machine" in capsys.readouterr().out
    assert plan(*vllm) == 0
    assert "1 device (cuda) on 1 machine" in capsys.readouterr().out
    assert plan("trainer.n_gpus_per_node=2", model, *vllm) == 2  # of the memory that this machine's have
    assert "a device has 40.0 GB" in capsys.readouterr().err


def test_the_memory_of_a_device_asks_for_one_where_there_is_none(model: str, capsys: pytest.CaptureFixture[str]):
    words = ["--device-memory", "300", "trainer.n_gpus_per_node=1", model, *TWO_NODES[2:]]
    assert plan(*words) == 0
    out = capsys.readouterr().out
    assert "1 device (GPU) on 1 machine" in out and "rollout: KV cache" in out
    assert plan(*words, "trainer.device=cpu") == 0
    assert "1 device (cpu) on 1 machine" in capsys.readouterr().out


def test_weights_without_room_are_refused(model: str, capsys: pytest.CaptureFixture[str]):
    words = ["--device-memory", "30", *TWO_NODES, model]
    assert plan(*words) == 2
    assert "the weights take 16.4 GB of a device, and gpu_memory_utilization=0.5" in capsys.readouterr().err


def test_offloading_that_an_engine_refuses_is_not_offered(model: str, capsys: pytest.CaptureFixture[str]):
    words = ["--device-memory", "50", *TWO_NODES[1:], model, "trainer.n_gpus_per_node=4"]
    for strategy, offered in (("fsdp2", True), ("fsdp", False)):
        assert plan(*words, f"actor_rollout_ref.actor.strategy={strategy}") == 2
        assert ("offload_policy" in capsys.readouterr().err) is offered


def test_without_a_model_the_placement_alone_is_shown(capsys: pytest.CaptureFixture[str]):
    assert plan(*TWO_NODES) == 0
    out = capsys.readouterr().out
    assert "replicas 0-7" in out and "memory: not known: model.path is not set" in out and "GB on" not in out


def test_the_same_as_json(model: str, capsys: pytest.CaptureFixture[str]):
    assert plan("--json", "--device-memory", "80", *TWO_NODES, model) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["pools"][0]["per_node"] == 8 and read["replicas"][0]["count"] == 16
    assert read["memory"][0]["holdings"][0]["sizes"][0] == 8_190_735_360 * 4 / 16
    assert read["decided"] == {
        "mode": "sync", "staleness": 0, "num_parts": 1, "old_logprobs": "pass", "parks": "no", "baselines": False
    }  # fmt: skip


def test_an_impossible_placement_is_refused(model: str, capsys: pytest.CaptureFixture[str]):
    assert plan(*TWO_NODES, model, f"{ROLLOUT}.tensor_model_parallel_size=3") == 2
    assert "the nearest that can is tensor_model_parallel_size=2" in capsys.readouterr().err


def test_a_device_that_is_too_small_is_refused_with_overrides_that_are_enough(
    model: str, capsys: pytest.CaptureFixture[str]
):
    words = ["--device-memory", "40", *TWO_NODES[1:], model]
    assert plan(*words) == 2
    captured = capsys.readouterr()
    assert "GB on a device of actor" in captured.out and "a device has 40.0 GB" in captured.err
    added = captured.err.partition("the nearest that fits adds ")[2].split()
    assert added and plan(*words, *added) == 0
    assert all(plan(*words, *(other for other in added if other != one)) == 2 for one in added)
    capsys.readouterr()
    assert plan("--device-memory", "5", *TWO_NODES, model, f"{ROLLOUT}.tensor_model_parallel_size=8") == 2
    assert "offloading alone does not help" in capsys.readouterr().err


def test_a_rank_has_its_part_of_a_device(model: str, capsys: pytest.CaptureFixture[str]):
    words = ["--device-memory", "80", *TWO_NODES[:3], model, f"{ROLLOUT}.gpu_memory_utilization=0.4"]
    assert plan(*words) == 0
    assert plan(*words, "ray_kwargs.devices_per_rank=0.5") == 2
    captured = capsys.readouterr()
    assert "16 ranks on parts of devices (GPU)" in captured.out and "what they hold there adds up" in captured.out
    assert "a device has 80.0 GB, of which ray_kwargs.devices_per_rank=0.5 is 40.0; the nearest" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-memory", "0", *TWO_NODES], "--device-memory 0.0 must be above 0"),
        ([*TWO_NODES, "trainer.device=abacus"], "trainer.device=abacus is no kind of device"),
        (["--config-name", "sft_trainer"], "is for runs of main_ppo"),
        ([*TWO_NODES, "trainer.nnoodes=2"], "unknown key"),
    ],
)
def test_mistakes_are_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert plan(*words) == 2
    assert message in capsys.readouterr().err


def test_the_help_has_an_example_whose_keys_are_known(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        plan("--help")
    text = capsys.readouterr().out
    assert "--device-memory GB" in text and "Exit code" in text
    load_config([word for word in text.split() if word.startswith(("trainer.", "actor_rollout_ref.")) and "=" in word])


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (ROOT / "docs" / "scale" / "placement.md").read_text()
    monkeypatch.chdir(tmp_path)
    save_8b(tmp_path / "Qwen3-8B")
    blocks = page.split("```")[1::2]
    examples = [(one, two) for one, two in itertools.pairwise(blocks) if "\nverl plan " in one]
    assert len(examples) == 2
    for command, printed in examples:
        line = command[command.index("\nverl plan ") :].replace("\\\n", " ").strip().splitlines()[0]
        plan(*line.split()[2:])
        captured = capsys.readouterr()
        said = "".join(f"{row}\n" for row in captured.err.splitlines() if row.startswith("error"))
        assert printed == f"text\n{captured.out}{said}"
