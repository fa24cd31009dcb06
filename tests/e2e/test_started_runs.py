"""Runs of each kind that an earlier version began resume."""

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.e2e import jobs
from tests.e2e.started_runs import HERE, KINDS, RUNS, enter, train


@pytest.mark.parametrize("kind", KINDS)
def test_a_started_run_goes_on_with_step_3(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", "metrics")
    shutil.copytree(RUNS / kind, tmp_path / kind)
    enter(tmp_path)
    found = train(kind)
    assert set(jobs.metrics(HERE, kind)) == {3}
    assert all(math.isfinite(value) for value in found.values() if isinstance(value, float))
    expected = json.loads((RUNS / "expected.json").read_text())[kind]
    assert expected.keys() <= found.keys()
    if kind != "asynchronous":  # which answers it takes up again depends on time
        same = {name: value for name, value in expected.items() if "mfu" not in name}
        different = {name: found[name] for name in same if found[name] != pytest.approx(same[name], 1e-3, 1e-4)}
        assert different == {}
