"""The soak of failures records what was wrong and goes on; its cases that no other test has, once each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from scripts.soak import failures, injections_in_groups
from scripts.soak.injections import Inject, Wrong, expect
from scripts.soak.injections_in_groups import SoakWorker
from scripts.soak.progress import Progress
from tests.e2e import jobs
from tests.tiers import soak
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup


def test_a_wrong_culprit_is_recorded_with_what_was_printed_and_the_next_repetition_begins_anew(tmp_path: Path):
    contexts, drawn = [], []

    @contextmanager
    def case() -> Iterator[Inject]:
        contexts.append(len(drawn))

        def inject(draw: Random) -> str:
            drawn.append(draw.random())
            if len(drawn) == 2:
                raise Wrong("missing: rank 1\nerror: rank 0 failed")
            return "error: rank 1 failed"

        yield inject

    for rounds in (3, 4):  # the second goes on
        failures.run_case("case", case, rounds, Progress("failures", tmp_path, "aaa"))
    assert contexts == [0, 2, 3] and len(set(drawn)) == 4
    facts = Progress("failures", tmp_path, "aaa").cases["case"]
    assert facts["rounds"] == 4
    assert facts["wrong"] == [{"repetition": 1, "lines": ["wrong: missing: rank 1", "error: rank 0 failed"]}]


def test_words_that_are_missing_or_blame_another_rank_are_wrong():
    assert expect("error: rank 1 failed", "rank 1", never="rank 0") == "error: rank 1 failed"
    with pytest.raises(Wrong, match="missing: rank 2"):
        expect("error: rank 1 failed", "rank 2")
    with pytest.raises(Wrong, match="must not be said: rank 1"):
        expect("error: rank 1 failed", "error", never="rank 1")


@pytest.mark.slow
@pytest.mark.parametrize("dies", [True, *soak([False])])
def test_a_rank_whose_queue_is_starved_is_named_with_what_ended_its_loader(dies: bool):
    said = injections_in_groups.failure("starve", 1, 1, dies)
    assert said.startswith("error: rank 1 failed in ")
    assert ("LookupError: no more rows" in said) == dies
    assert "it has not entered the collective" in said and "in take(): return items.get()" in said


@pytest.mark.slow
def test_ranks_of_which_one_is_in_another_network_say_who_is_missing_and_where_it_looked():
    with injections_in_groups.separate_networks() as inject:
        inject(Random(0))


@pytest.mark.slow
def test_a_rank_that_loads_a_model_is_not_stalled(tmp_path: Path):
    jobs.prepare(tmp_path)
    group = ProcessGroup(SoakWorker, Layout.data_parallel(2), stall_timeout_s=1.5)
    try:
        assert group.broadcast("load_models", 3.0, f"{tmp_path}/model") == [2.0, 2.0]
    finally:
        group.close()
