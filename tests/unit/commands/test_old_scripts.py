"""The small scripts at their old paths, as users call them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import diagnose, init_random_model
from tests.conftest import ROOT
from verl.commands.quickstart.small_model import make_model
from verl.observe.rollout_dumps import dump_rollouts

SCRIPTS = ("print_cfg", "diagnose", "init_random_model", "rollout_viewer")


def run(script: str, *arguments: object, code: int = 0, keys: str = "") -> str:
    """What the script prints, both streams; it must end with `code`."""
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, input=keys, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script: str):
    assert f"python scripts/{script}.py" in run(script, "--help")


def test_print_cfg_prints_the_resolved_configuration():
    lines = run("print_cfg", "data.train_batch_size=8").splitlines()
    assert "data.train_batch_size=8  # override 'data.train_batch_size=8'" in lines
    assert "did you mean 'data.train_batch_size'" in run("print_cfg", "data.train_batch_siz=8", code=2)


def test_diagnose_reports_on_the_machine_and_a_configuration(capsys: pytest.CaptureFixture[str]):
    assert diagnose.main(["--json", "actor_rollout_ref.model.path=/nowhere"]) == 1
    report = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row["status"] for row in report["this configuration"]}
    assert rows["actor_rollout_ref.model.path"] == "bad" and len(report) > 1


def test_a_random_model_has_the_changed_shape_loads_and_is_decided_by_its_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_model(tmp_path / "model", "0123456789+=", 1, hidden=64)
    changes = tmp_path / "small.json"
    changes.write_text(json.dumps({"num_hidden_layers": 1, "intermediate_size": 32, "model_type": "qwen3"}))
    same = ["--hf_model_path", f"{tmp_path}/model", "--new_config_path", str(changes), "--dtype=float32"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert init_random_model.main([*same, f"--seed={seed}", f"--output_path={tmp_path}/{name}"]) == 0
    said = capsys.readouterr().out
    a, b, c = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "abc")
    assert (a.config.num_hidden_layers, a.config.intermediate_size, a.config.hidden_size) == (1, 32, 64)
    assert f"{sum(p.numel() for p in a.parameters())} parameters at random" in said
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (a, b, c)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert AutoTokenizer.from_pretrained(tmp_path / "a")("1+2=").input_ids
    assert init_random_model.main([*same, f"--output_path={tmp_path}/a"]) == 2
    assert "is not empty" in capsys.readouterr().err
    for values, says in (
        ('{"num_hidden_layer": 1}', "has no 'num_hidden_layer'; did you mean 'num_hidden_layers'"),
        ('{"model_type": "llama"}', "'llama' in the file and 'qwen3' in"),
        ("[1]", "must hold an object"),
        ('{"hidden_size": "wide"}', "no model can be made"),
    ):
        changes.write_text(values)
        assert init_random_model.main([*same, f"--output_path={tmp_path}/d"]) == 2
        assert says in capsys.readouterr().err


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    for step, scores in ((1, [0.5, 0.25]), (12, [1.0, None, 0.0])):
        texts = [f"[bold]answer {step}.{i}" for i in range(len(scores))]
        dump_rollouts(tmp_path, step, [f"prompt {i}" for i in range(len(scores))], texts, ["4"] * len(scores), scores)
    return tmp_path


def answers(text: str) -> list[str]:
    return [line.removeprefix("output: [bold]answer ") for line in text.splitlines() if line.startswith("output: ")]


def test_the_viewer_prints_sorted_and_searched_answers(dumps: Path):
    text = run("rollout_viewer", dumps, "--sort", "score", "--print", 9)
    assert answers(text) == ["12.2", "12.0", "12.1"] and "score=0.0" in text and "gts: 4" in text
    assert answers(run("rollout_viewer", dumps, "--step", 1, "--search", "PROMPT 1", "--print", 9)) == ["1.1"]
    assert "has no step 3; it has 1, 12" in run("rollout_viewer", dumps, "--step", 3, code=2)
    assert "no answer has a field 'acc'" in run("rollout_viewer", dumps, "--sort", "acc", "--print", 1, code=2)
    assert "trainer.rollout_data_dir" in run("rollout_viewer", dumps / "nowhere", code=2)


def test_the_viewer_follows_keys_until_quit_or_the_end_of_the_input(dumps: Path):
    keys = "\n".join(["", "3", "b", "s score", "-", "/ 1.0", "a", "s acc", "x", "q", "ignored"])
    text = run("rollout_viewer", dumps, keys=keys)
    assert answers(text) == ["12.0", "12.1", "12.2", "12.1", "12.2", "1.1", "1.0", "1.0", "1.0", "1.0"]
    assert "no answer has a field 'acc'" in text and "there is no key 'x'" in text
    assert answers(run("rollout_viewer", dumps, keys="\n")) == ["12.0", "12.1"]
