"""The legend of a batch's columns says what the code writes and reads, and what a real step puts there."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from scripts.layers import SHIMS, covers, module_name
from tests.conftest import ROOT
from tests.e2e.jobs import ARR, prepare, train
from verl.data.batch import Batch
from verl.data.columns import COLUMNS
from verl.trainer.ppo.trainer import PPOTrainer
from verl.workers.batch_dispatch import ShardDispatcher
from verl.workers.engine.update_totals import TokenMetricSums

BATCHES = {"batch", "mini", "shard", "part", "whole", "indexed", "selected"}  # names of variables that hold a Batch
PART = "reward_parts.NAME"  # stands for all columns that begin like this
Use = tuple[str, str, str]  # name of the column, function, place


def constants(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(name with its class, node) of every function of a file, and of every class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
            yield from functions(node, f"{node.name}.")


def named_texts(tree: ast.Module) -> dict[str, list[str]]:
    """Texts in what a file assigns at its top level, by name."""
    return {
        last_name(target): constants(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }


def written(node: ast.AST, named: dict[str, list[str]]) -> list[str]:
    """Columns that a call adds: batch.with_columns(x=…), Batch(offsets, {"x": …}, {})."""
    if not isinstance(node, ast.Call):
        return []
    if last_name(node.func) == "with_columns":
        unpacked = [k.value for k in node.keywords if k.arg is None and isinstance(k.value, ast.Dict)]
        keys = [key for keys in unpacked for key in keys.keys if key is not None]
        texts = [text for key in keys for text in (constants(key) or named.get(last_name(key), []))]
        texts += [PART for key in keys if isinstance(key, ast.BinOp) and last_name(key.left) == "REWARD_PART"]
        return [k.arg for k in node.keywords if k.arg] + texts
    if last_name(node.func) in ("Batch", "cls"):
        dicts = [a for a in node.args if isinstance(a, ast.Dict)]
        return [text for d in dicts for key in d.keys if isinstance(key, ast.Constant) for text in constants(key)]
    return []


def read(node: ast.AST) -> list[str]:
    """Columns asked for: batch.require("x"), batch["x"], "x" in batch, select_columns(["x"]), a loss's `columns`."""
    if isinstance(node, ast.Call) and last_name(node.func) == "require":
        return constants(node.args[0])
    if isinstance(node, ast.Call) and last_name(node.func) == "select_columns":
        return [text for argument in node.args for text in constants(argument)]
    if isinstance(node, ast.Subscript) and last_name(node.value) in BATCHES:
        return constants(node.slice) if isinstance(node.slice, ast.Constant) else []
    if isinstance(node, ast.Compare) and last_name(node.comparators[0]) in BATCHES:
        return constants(node.left) if isinstance(node.left, ast.Constant) else []
    if isinstance(node, ast.AnnAssign | ast.AugAssign) and last_name(node.target) in ("columns", "optional_columns"):
        return constants(node.value) if isinstance(node.value, ast.Tuple) else []
    return []


@cache
def uses() -> tuple[list[Use], list[Use], dict[str, set[str]]]:
    """Every write, every read, and the texts that each function mentions, itself or by a constant of its file."""
    writes, reads, mentions = [], [], defaultdict(set)
    for path in sorted((ROOT / "verl").rglob("*.py")):
        text = path.read_text()
        if "Batch" not in text and "columns" not in text:
            continue
        tree = ast.parse(text)
        named = named_texts(tree)
        for function, body in functions(tree):
            for node in ast.walk(body):
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
                if not isinstance(body, ast.ClassDef):
                    writes += [(name, function, place) for name in written(node, named)]
                if "Batch" in text or not isinstance(node, ast.Subscript | ast.Compare):
                    reads += [(name, function, place) for name in read(node)]
                if isinstance(node, ast.keyword) and node.arg:
                    mentions[function].add(node.arg)
                mentions[function].update(named.get(last_name(node), ()) if isinstance(node, ast.Name) else ())
                mentions[function].update([PART] if last_name(node) == "REWARD_PART" else [])
            mentions[function].update(constants(body))
    return writes, reads, mentions


def is_shim(place: str) -> bool:
    return place.startswith("verl/doors/") or covers(SHIMS, module_name(Path(place.partition(":")[0]), Path()))


def test_every_column_that_code_writes_or_reads_is_in_the_legend():
    writes, reads, _ = uses()
    unknown = sorted({f"{place} {name}" for name, _, place in writes + reads if name not in COLUMNS})
    assert not unknown, "add to COLUMNS in verl/data/columns.py:\n" + "\n".join(unknown)


def test_the_legend_names_every_function_that_writes_a_column():
    writers = {(name, function) for name, function, place in uses()[0] if not is_shim(place)}
    listed = {(name, function) for name, column in COLUMNS.items() for function in column.written_by}
    assert writers - listed == set(), "written_by in verl/data/columns.py lacks these"
    assert listed - writers == set(), (
        "these functions do not write these columns; see written_by in verl/data/columns.py"
    )


def test_every_function_the_legend_names_as_a_reader_mentions_the_column():
    writes, reads, mentions = uses()
    wrong = [f"{n}: {f}" for n, column in COLUMNS.items() for f in column.read_by if n not in mentions[f]]
    assert not wrong, "read_by in verl/data/columns.py names functions that are gone or do not read the column"
    assert COLUMNS.keys() - {name for name, _, _ in writes + reads} == set(), "in the legend and nowhere else"
    assert not [name for name, column in COLUMNS.items() if not column.read_by], "a column that nothing reads"


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> list[Batch]:
    """The batch of a real step with critic and reference, its mini-batches and its micro-batches."""
    folder, seen = tmp_path_factory.mktemp("columns"), []

    def keep_batch(owner: type, method: str, batch_of) -> None:
        function = getattr(owner, method)

        def watched(*args):
            result = function(*args)
            seen.append(batch_of(args, result))
            return result

        patch.setattr(owner, method, watched)

    prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_FILE_LOGGER_ROOT", str(folder / "metrics"))
        keep_batch(PPOTrainer, "step", lambda args, record: record.batch)
        keep_batch(ShardDispatcher, "update", lambda args, result: args[1])
        keep_batch(TokenMetricSums, "add", lambda args, result: args[3].batch)
        train(
            folder,
            "run",
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=True",
            f"{ARR}.actor.use_kl_loss=True",
            f"critic.model.path={folder / 'model'}",
            "critic.fsdp.dtype=float32",
            "trainer.total_training_steps=1",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=False",
        )
    return seen


def test_a_real_step_fills_every_column_that_code_writes(batches):
    seen = {name for batch in batches for name in (*batch.token_columns, *batch.sequence_columns)}
    always = {name for name, column in COLUMNS.items() if column.written_by and not column.asked}
    assert seen == {name for name in always if COLUMNS[name].scope != "preference pairs"}


def test_columns_of_a_real_step_have_the_shapes_types_and_masked_values_of_the_legend(batches):
    for batch in batches:
        sizes = {"(T,)": (batch.num_tokens,), "(N,)": (batch.num_sequences,), "(N, 2)": (batch.num_sequences, 2)}
        for name, column in {**batch.token_columns, **batch.sequence_columns}.items():
            legend = COLUMNS[name]
            found = (tuple(column.shape), str(column.dtype).removeprefix("torch."))
            assert found == (sizes[legend.shape], legend.dtype), name
            assert (name in batch.token_columns) == legend.shape.startswith("(T"), name
            if legend.masked is not None:
                elsewhere = column[~batch["loss_mask"]]
                assert torch.equal(elsewhere, torch.full_like(elsewhere, legend.masked)), name


def test_a_column_of_a_mini_batch_or_micro_batch_is_not_in_the_step_s_batch(batches):
    step = batches[-1]
    assert all(COLUMNS[name].scope == "step" for name in (*step.token_columns, *step.sequence_columns))
