"""Which of several ways is chosen, and that a run and its ranks stay with it."""

import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from verl.models import fastest as module
from verl.models.decoder.decode_attention import attend_by_kernel, attend_by_products, fastest_attention
from verl.models.decoder.lean_weights import decoder_shape, fastest_layout
from verl.models.decoder.onednn_weights import padded_rows
from verl.models.decoder.weight_layouts import possible_layouts
from verl.models.fastest import _read, _store, fastest, keep_choices_in, machine, pick, processor
from verl.models.rms_norm import fused_norm_is_faster

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_run_file", None)
    monkeypatch.setattr(module, "BUDGET_S", 60.0)
    return tmp_path / "cache" / "verl" / "fastest.json"


def ways(slow: str, fast: str) -> dict:
    return {slow: lambda: lambda: sum(range(20_000)), fast: lambda: lambda: None}


def refuse() -> None:
    raise AssertionError("measured although the choice was known")


def test_a_clearly_faster_way_is_chosen_and_the_machine_remembers_it(machine_file: Path):
    assert fastest("product", ways("plain", "merged")) == "merged"
    assert json.loads(machine_file.read_text()) == {f"{machine()} | product": "merged"}
    assert fastest("product", {"plain": refuse, "merged": refuse}) == "merged"


def test_the_plain_way_stays_unless_another_is_clearly_faster():
    assert pick({"plain": 1.0, "merged": 0.99}) == "plain"
    assert pick({"plain": 1.0, "merged": 1.5, "onednn": 0.8}) == "onednn"


def test_a_resumed_run_computes_as_before_though_the_machine_forgot(tmp_path: Path, machine_file: Path):
    keep_choices_in(tmp_path / "run")
    assert fastest("product", ways("plain", "merged")) == "merged"
    machine_file.unlink()
    assert fastest("product", ways("merged", "plain")) == "merged"
    machine_file.write_text(json.dumps({f"{machine()} | product": "plain"}))
    assert fastest("product", {"plain": refuse, "merged": refuse}) == "merged"


def test_a_measurement_cut_short_counts_for_the_run_only(
    tmp_path: Path, machine_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "BUDGET_S", 0.0)
    keep_choices_in(tmp_path / "run")
    assert fastest("product", ways("plain", "merged")) == "merged"
    assert not machine_file.exists()
    assert fastest("product", {"plain": refuse, "merged": refuse}) == "merged"


def test_a_choice_that_is_no_longer_possible_is_made_again():
    fastest("product", ways("plain", "merged"))
    assert fastest("product", ways("plain", "onednn")) == "onednn"


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": 1}', ""])
def test_a_damaged_file_is_measured_over(content: str, machine_file: Path):
    machine_file.parent.mkdir(parents=True)
    machine_file.write_text(content)
    assert fastest("product", ways("plain", "merged")) == "merged"
    assert json.loads(machine_file.read_text())[f"{machine()} | product"] == "merged"


def test_a_cache_that_cannot_be_written_is_reported_and_nothing_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert fastest("product", ways("plain", "merged")) == "merged"
    assert "ranks may choose different kernels" in caplog.text and "cannot be written" in caplog.text


def test_ranks_that_start_together_agree(tmp_path: Path):
    program = (
        "import pathlib, random, sys; from verl.models.fastest import _read, _store, fastest, keep_choices_in\n"
        "keep_choices_in(pathlib.Path(sys.argv[1]))\n"
        "work = {name: random.randrange(10, 10000) for name in ('a', 'b', 'c')}\n"
        "ways = {name: lambda count=count: lambda: sum(range(count)) for name, count in work.items()}\n"
        "print(fastest('product', ways))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert len({rank.communicate()[0] for rank in ranks}) == 1
    assert [rank.returncode for rank in ranks] == [0, 0]


CHOICES = {
    "layout": lambda: fastest_layout(small_decoder(), torch.float32, CPU).name,
    "attention": lambda: fastest_attention(decoder_shape(small_decoder()), torch.float32, CPU),
    "norm": lambda: fused_norm_is_faster(Qwen3RMSNorm, 32),
}
PLAIN = {"layout": "plain", "attention": attend_by_kernel, "norm": False}


def small_decoder() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                        num_attention_heads=1, num_key_value_heads=1, head_dim=32))  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("plain_is_faster", [True, False])
def test_every_choice_is_the_plain_way_where_the_clock_says_so(
    choice: str, plain_is_faster: bool, monkeypatch: pytest.MonkeyPatch
):
    """By a clock that gives the first way 1 s and each other way the double or half of that."""

    def timed(ways: dict) -> tuple[str, bool]:
        started: list[float] = [0.0]
        ticks = itertools.cycle(
            1.0 if number == 0 else (2.0 if plain_is_faster else 0.5) for number in range(len(ways))
        )

        def clock() -> float:
            started.append(started[-1] + (next(ticks) if len(started) % 2 == 0 else 0.0))
            return started[-1]

        monkeypatch.setattr(module.time, "thread_time", clock)
        return real(ways)

    real = module.measure
    monkeypatch.setattr(module, "measure", timed)
    assert (CHOICES[choice]() == PLAIN[choice]) == plain_is_faster


def test_the_plain_layout_is_always_possible_and_alone_on_devices():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert possible_layouts(1000, dtype, CPU)[0].is_plain
        assert [layout.name for layout in possible_layouts(1000, dtype, torch.device("meta"))] == ["plain"]
    assert [layout.name for layout in possible_layouts(10**10, torch.float32, CPU)] == ["plain"]


def test_both_ways_of_decode_attention_agree():
    q, keys, values = torch.randn(3, 2, 2, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8)
    bias = torch.zeros(3, 1, 1, 9)
    bias[0, ..., :4] = -torch.inf
    for mask in (None, bias):
        expected = attend_by_kernel(q, keys, values, mask, 0.3)
        torch.testing.assert_close(attend_by_products(q, keys, values, mask, 0.3), expected)


def test_few_different_numbers_of_rows_reach_onednn():
    sizes = {rows: padded_rows(rows) for rows in range(1, 4097)}
    assert all(rows <= padded <= max(rows + 7, rows * 9 // 8) for rows, padded in sizes.items())
    assert len(set(sizes.values())) < 80 and all(padded_rows(size) == size for size in sizes.values())


def test_the_processor_has_a_name_and_instructions():
    assert processor()["name"] and processor()["instructions"]


def test_benchmarks_record_the_make_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from support.record import save

    save(tmp_path / "figures.json", {"rows": []})
    assert json.loads((tmp_path / "figures.json").read_text())["processor"] == processor()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"[]", b'"x"', b"null", b'{"key": ["plain"]}', None])
def test_a_file_of_choices_that_is_none_is_passed_over(content: bytes | None, tmp_path: Path):
    file = tmp_path / "fastest.json"
    file.mkdir() if content is None else file.write_bytes(content)
    assert _read(file) == {}
    _store(file, "key", "plain")
    assert content is None or _read(file) == {"key": "plain"}
