"""`verl serve` looks at its model before it listens, as a training run does before its first step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import jobs
from verl.cli import main
from verl.commands.serve import command
from verl.config import load_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    jobs.prepare(tmp_path)
    return tmp_path / "model"


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eos_token_id": 4000}, "the end token 4000 is outside the model's vocabulary"),
        ({"vocab_size": 5}, "config.json and the tokenizer are of different models"),
    ],
)
def test_a_model_that_does_not_go_with_its_tokenizer_is_not_served(model: Path, changes: Any, says: str, capsys: Any):
    for file in model.glob("*config.json"):
        if file.name == "config.json" or "eos_token_id" in json.loads(file.read_text()):
            edit(file, **changes)
    assert main(["serve", f"model={model}", "--port", "0"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(": loading libraries")]
    assert len(said) == 1 and says in said[0]


def test_more_positions_than_the_model_was_made_for_are_a_warning(model: Path, capsys: Any):
    options = command._parser().parse_args([])
    command.build_server(load_config([f"actor_rollout_ref.model.path={model}"]), options).engine.close()
    assert "warning" not in capsys.readouterr().err
    edit(model / "config.json", max_position_embeddings=32)
    overrides = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.max_model_len=2048"]
    command.build_server(load_config(overrides), options).engine.close()
    said = capsys.readouterr().err
    assert "sequences may have 2048 tokens (actor_rollout_ref.rollout.max_model_len), but max_position" in said
