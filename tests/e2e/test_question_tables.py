"""A run on a table of questions and answers, and the commands that it prints, run as they are printed."""

import json
import shlex
from pathlib import Path

import pytest

from tests.e2e import jobs
from verl import cli

ARR = jobs.ARR
TABLE = ("data.prompt_key=question", "data.answer_key=answer", "data.system_prompt=1+1", "reward.scorer=exact")
HELD_OUT = [{"question": f"{a}+1=", "answer": str(a + 1), "extra_info": {}, "more": [{"a": {}}]} for a in (1, 2)]


def test_a_table_is_trained_on_and_the_printed_pair_scores_its_held_out_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    jobs.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    (tmp_path / "sums.csv").write_text("question,answer\n1+1=,2\n2+2=,4\n3+3=,6\n4+4=,8\n")
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELD_OUT))
    given = [
        word for word in jobs.overrides(tmp_path, "run") if not word.startswith(("data.train_", "data.val", "rew"))
    ]
    given += ["data.train_files=s*.csv", "data.train_batch_size=4", *TABLE, "data.max_prompt_length=16"]
    given += ["trainer.total_training_steps=1"]
    assert cli.main(["train", *given, "trainer.save_freq=-1"]) == 0
    out = capsys.readouterr().out
    assert "4 prompts, no validation (data.val_files is not set)" in out and "evaluate" not in out
    given += ["data.val_files=held_out.jsonl", "trainer.test_freq=1", f"{ARR}.rollout.val_kwargs.n=1"]
    given += ["trainer.experiment_name=again", f"trainer.default_local_dir={tmp_path / 'again'}"]
    assert cli.main(["train", *given]) == 0
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("evaluate ")]
    assert any(name.startswith("val-core/held_out/") for name in jobs.metrics(tmp_path, "again")[1])
    for line in lines:
        assert cli.main(shlex.split(line)[1:]) == 0, line
    assert "test_score/held_out" in capsys.readouterr().out.splitlines()[-1]
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in HELD_OUT[0]} for row in rows] == HELD_OUT
    assert {row["data_source"] for row in rows} == {"held_out"}
    words = [word.replace("answers.jsonl", "answers.parquet") for word in shlex.split(lines[0])[1:]]
    assert cli.main(words) == 0 and cli.main(["eval", "data.path=answers.parquet", *TABLE[:2], TABLE[3]]) == 0
