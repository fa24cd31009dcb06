"""Children that compare formulas: killed at the limit, replaced, counted, and gone with their parent."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import import_or_skip
from verl.rewards.scorer_lookup import find_scorer
from verl.rewards.scorers import equivalence_pool
from verl.rewards.scorers.equivalence_pool import EquivalencePool, shared_pool
from verl.rewards.scorers.math_reward import score_answer
from verl.runtime.child import AskedChild
from verl.utils.errors import ConfigError, DataError

HANGS = "9^{9^{9^{9}}}"


@pytest.fixture
def pool():
    import_or_skip("math_verify")
    pool = EquivalencePool(size=1, limit_s=0.3)
    yield pool
    pool.close()


def test_a_comparison_that_hangs_is_killed_and_counted_and_the_next_one_is_right(pool):
    assert pool.compare("(x+1)^{2}", "x^{2}+2x+1") is True
    assert pool.compare(HANGS, "3") is None
    assert pool.timeouts == 1
    assert pool.compare("2x", "x+x") is True
    assert pool.compare("2x", "3x") is False
    assert pool.timeouts == 1


def test_many_threads_share_the_children_and_each_gets_its_own_verdict():
    import_or_skip("math_verify")
    pool = EquivalencePool(size=2)
    pairs = [(f"{n}x", f"{n - 1}x+x" if n % 3 else f"{n}x+1") for n in range(2, 62)]
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda pair: pool.compare(*pair), pairs))
    pool.close()
    assert verdicts == [bool(n % 3) for n in range(2, 62)]


def test_a_child_that_was_ended_from_outside_is_replaced(pool):
    assert pool.compare("2x", "x+x") is True
    child = pool._slots._free.get()
    child._asked.child.process.kill()
    child._asked.child.process.wait()
    pool._slots._free.put(child)
    assert pool.compare("2x", "x+x") is None
    assert pool.compare("2x", "x+x") is True
    assert pool.timeouts == 1


def test_a_child_may_not_take_all_memory(pool):
    assert pool.compare("2x", "x+x") is True
    child = pool._slots._free.get()
    limits = Path(f"/proc/{child._asked.child.process.pid}/limits").read_text().splitlines()
    pool._slots._free.put(child)
    assert [line.split()[3:5] for line in limits if line.startswith("Max address space")] == [[str(1 << 30)] * 2]


def test_a_formula_nested_too_deep_is_undecided_and_harms_no_later_one(pool):
    assert pool.compare("(" * 400 + "x" + ")" * 400, "x") is None
    assert pool.compare("2x", "x+x") is True


def test_the_text_of_an_answer_is_never_run(pool, tmp_path):
    target = tmp_path / "made"
    for text in (f"__import__('os').mkdir('{target}')", f"(lambda: open('{target}','w'))()", "exit()", '", "gold": "'):
        assert pool.compare(text, "1") is False
        assert pool.compare("1", text) is False
    assert not target.exists() and pool.timeouts == 0


def test_an_undecided_answer_counts_as_wrong_and_says_so(monkeypatch):
    import_or_skip("math_verify")
    pool = EquivalencePool(size=1, limit_s=0.3)
    monkeypatch.setattr(equivalence_pool.shared_pool, "_pool", pool)
    assert score_answer(rf"\boxed{{{HANGS}}}", "3") == {"score": 0.0, "acc": 0.0, "pred": HANGS, "undecided": 1.0}
    assert score_answer(r"\boxed{2x}", "3x")["undecided"] == 0.0
    hangs = ",".join(f"{n}+{HANGS}" for n in range(5))
    assert pool.timeouts == 1
    for gold, answer in (("1,2,3,4,5", hangs), ("(1,2,3,4,5)", f"({hangs})")):
        assert score_answer(rf"\boxed{{{answer}}}", gold)["undecided"] == 1.0
    assert pool.timeouts == 3  # one for each answer
    pool.close()


def test_it_works_outside_the_main_thread_and_in_a_forked_process():
    import_or_skip("math_verify")
    assert shared_pool().compare("2x", "x+x") is True
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(shared_pool().compare("x y", "y x")))
    thread.start()
    thread.join()
    assert verdicts == [True]
    code = (
        "import os\nfrom verl.rewards.scorers.equivalence_pool import shared_pool\n"
        "assert shared_pool().compare('2x', 'x+x')\n"
        "pid = os.fork()\n"
        "right = shared_pool().compare('3x', '2x+x') is True and shared_pool().compare('3x', '2x') is False\n"
        "if not pid: os._exit(0 if right else 1)\n"
        "assert right and os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_children_end_with_their_parent_however_it_ends():
    import_or_skip("math_verify")
    code = (
        "import os, signal\nfrom verl.rewards.scorers.equivalence_pool import EquivalencePool\n"
        "pool = EquivalencePool(size=1)\npool.compare('2x', 'x+x')\nchild = pool._slots._free.get()\n"
        "print(child._asked.child.process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    child = Path(f"/proc/{int(done.stdout)}/cmdline")
    end = time.monotonic() + 60
    while child.exists() and b"equivalence_child" in child.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert time.monotonic() < end, "it outlives its parent"


def test_without_math_verify_the_scorer_is_refused_with_the_extra(monkeypatch):
    monkeypatch.setattr(equivalence_pool, "_is_installed", lambda: False)
    for source in ("lighteval/MATH", "aime2024", "numina_olympiads", "hiyouga/geometry3k"):
        with pytest.raises(ConfigError, match=r"math-verify, which is not installed; .*\.\[math\]"):
            find_scorer(source)
    with pytest.raises(ConfigError, match=r"\.\[math\]"):
        EquivalencePool(size=1).compare("x", "y")
    assert find_scorer("openai/gsm8k")("#### 4", "4")["score"] == 1.0


def test_a_child_that_cannot_import_math_verify_says_why():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = AskedChild([sys.executable, "-S", "-P", str(equivalence_pool._CHILD_FILE)], environment)
    assert "No module named 'latex2sympy2_extended'" in json.loads(asked.receive(60.0))["error"]
    asked.close()


def test_rows_whose_scorer_lacks_its_extra_are_refused_before_anything_is_scored(monkeypatch, tmp_path):
    from verl.commands.score_answers import print_scores
    from verl.config import load_config

    monkeypatch.setattr(equivalence_pool, "_is_installed", lambda: False)
    path = tmp_path / "answers.jsonl"
    row = {"data_source": "lighteval/MATH", "responses": ["4"], "reward_model": {"ground_truth": "4"}}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"answers\.jsonl: .*not installed; .*\.\[math\]"):
        print_scores(load_config([f"data.path={path}"], config_name="evaluation"))
