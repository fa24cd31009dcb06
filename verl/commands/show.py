"""`verl show RUN --step N`: trajectories of the ledger as text, tokens coloured by advantage or log-prob."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.data.batch import Batch
from verl.data.data_files import FileRows
from verl.observe.ledger import LedgerStep, ledger_steps, read_ledger
from verl.observe.run_record import RunRecord, find_run
from verl.utils.errors import DataError, VerlError
from verl.utils.paths import expand_home
from verl.utils.process_end import say_error

COLOUR_COLUMNS = {"advantage": "advantages", "logprob": "old_logprobs"}
WHITE = "rgb(255,255,255)"  # the colour called white is grey in some terminals
EPILOG = """RUN is the folder of a run, or <project>/<experiment>.

  verl show tutorial/mine --step 20 --worst 5     the five lowest rewards of step 20
  verl show tutorial/mine --best 3                the three highest of the last recorded step
  verl show tutorial/mine --step 20 --row 17      every answer to the prompt of data row 17"""


def main(argv: Sequence[str] | None = None) -> int:
    """0: shown; 2: a mistake the message explains."""
    parser = argparse.ArgumentParser(
        prog="verl show", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--step", type=int, help="the step (default: the last one recorded)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--worst", type=int, metavar="K", help="the K lowest rewards (default: 5)")
    which.add_argument("--best", type=int, metavar="K", help="the K highest rewards")
    which.add_argument("--row", type=int, metavar="R", help="all answers to the prompt of this data row")
    parser.add_argument("--color", choices=[*COLOUR_COLUMNS, "none"], default="advantage", help="what colours tokens")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer folder (default: that of the run)")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        record = find_run(options.run)
        step = read_step(record, options.step)
        chosen = choose_sequences(step.batch, options.worst, options.best, options.row)
        print_trajectories(
            step, chosen, load_run_tokenizer(record, options.tokenizer), options.color, open_train_rows(record)
        )
    except VerlError as error:
        say_error(f"error: {error}")
        return 2
    return 0


def read_step(record: RunRecord, step: int | None) -> LedgerStep:
    """The record of `step`, or of the last step; DataError where the run keeps none."""
    folder = None if record.folder is None else record.folder / "ledger"
    steps = ledger_steps(folder) if folder is not None and folder.is_dir() else []
    if folder is None or not steps:
        if folder is not None and dict(record.config.get("trainer", {})).get("ledger", True):
            raise DataError(f"{record.name} recorded no step: it ended before step 1, or has not finished it yet")
        raise DataError(f"{record.name} has no ledger: name the folder of a run with trainer.ledger=True")
    return read_ledger(folder, steps[-1] if step is None else step)


def choose_sequences(batch: Batch, worst: int | None, best: int | None, row: int | None) -> list[int]:
    """Sequence numbers: those of a data row, or the lowest or highest rewards, the most extreme one first."""
    if row is not None:
        rows = batch.require("rows", "the ledger").tolist()
        if row not in rows:
            raise DataError(
                f"no answer to data row {row} in this step; it has rows {', '.join(map(str, sorted(set(rows))))}"
            )
        return [number for number, found in enumerate(rows) if found == row]
    count = best or worst or 5
    if count < 1:
        raise DataError(f"--worst and --best count trajectories, at least 1, not {count}")
    order = torch.argsort(batch.require("rewards", "the ledger"), descending=best is not None, stable=True)
    return [int(number) for number in order[:count]]


def load_run_tokenizer(record: RunRecord, folder: Path | None) -> Any:
    """The tokenizer in `folder`, else that of the run's model; None where it is not there any more."""
    from verl.config.model import HFModelConfig
    from verl.models.load import load_tokenizer
    from verl.utils.errors import ConfigError

    if folder is not None:
        return load_tokenizer(HFModelConfig(path=str(expand_home(folder, "--tokenizer"))))
    model = dict(record.config.get("actor_rollout_ref", {})).get("model", {})
    try:
        return load_tokenizer(HFModelConfig(path=model.get("path"), tokenizer_path=model.get("tokenizer_path")))
    except ConfigError as error:
        print(f"token ids instead of text: {error} (or name one by --tokenizer)", file=sys.stderr)
        return None


def open_train_rows(record: RunRecord) -> FileRows | None:
    """The rows that the run trained on; None where they are not there any more, or a class of the user made them."""
    data = dict(record.config.get("data", {}))
    if not data.get("train_files") or dict(data.get("custom_cls") or {}).get("path"):
        return None
    try:
        return FileRows(data["train_files"])
    except (DataError, OSError):
        return None


def expected_answer(data: FileRows | None, row: int, prompt: str) -> Any:
    """The ground truth of a data row; None without one, or where the row does not hold this prompt any more."""
    if data is None or not 0 <= row < len(data):
        return None
    raw = data[row]
    messages, answer = raw.get("prompt"), raw.get("reward_model")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or not isinstance(answer, dict) or str(last.get("content")).strip() not in prompt:
        return None
    return answer.get("ground_truth")


def print_trajectories(
    step: LedgerStep, chosen: Sequence[int], tokenizer: Any, color: str, data: FileRows | None
) -> None:
    """Print the trajectories: reward and why it ended, the expected answer, the prompt, and what followed it."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    bounds, batch = step.batch.cu_seqlens.tolist(), step.batch
    column = COLOUR_COLUMNS.get(color)
    values = batch[column] if column is not None and column in batch else None
    if column is not None and values is None:
        console.print(f"the ledger of this step has no {column}: tokens are not coloured", style="yellow")
    elif values is not None:
        console.print(legend(color))
    rewards, rows = batch.require("rewards", "the ledger"), batch.require("rows", "the ledger")
    for number in chosen:
        part = slice(bounds[number], bounds[number + 1])
        reward, reason = float(rewards[number]), step.stop_reasons[number]
        length = int(batch["loss_mask"][part].sum())
        console.rule(
            f"step {step.step}, row {int(rows[number])}, reward {reward:.4g}, {length} sampled tokens, {reason}"
        )
        tokens, mask = batch["tokens"][part], batch["loss_mask"][part]
        prompt = "" if tokenizer is None else str(tokenizer.decode(tokens[~mask].tolist()))
        if (expected := expected_answer(data, int(rows[number]), prompt)) is not None:
            console.print(f"expected: {expected}", markup=False)
        console.print(coloured(tokens, mask, None if values is None else values[part], tokenizer, color))


def legend(color: str) -> Any:
    from rich.text import Text

    samples = {"advantage": (-1.0, 0.0, 1.0), "logprob": (-6.0, -2.0, 0.0)}[color]
    text = Text(f"{color} of sampled tokens: ")
    for value in samples:
        text.append(f" {value:+g} ", style=style_of(value, 1.0, color))
    return text.append("  (prompt and tool tokens are dim)")


def coloured(tokens: Tensor, mask: Tensor, values: Tensor | None, tokenizer: Any, color: str) -> Any:
    """The text of a trajectory. Neighbouring tokens of one style are decoded together, so that no character is cut."""
    from rich.text import Text

    sampled = mask.tolist()
    scale = float(values[mask].abs().max()) if values is not None and bool(mask.any()) else 1.0
    styles = ["dim"] * len(sampled)
    for position, is_sampled in enumerate(sampled):
        if is_sampled:
            styles[position] = "" if values is None else style_of(float(values[position]), scale or 1.0, color)
    text, start = Text(), 0
    for end in range(1, len(styles) + 1):
        if end == len(styles) or styles[end] != styles[start]:
            ids = tokens[start:end].tolist()
            piece = " ".join(map(str, ids)) + " " if tokenizer is None else str(tokenizer.decode(ids))
            text.append(piece, style=styles[start])
            start = end
    return text


def style_of(value: float, scale: float, color: str) -> str:
    """White on green above and on red below 0 for advantages; on a stronger blue the less probable a token was.

    It sets text and background, to be read in light and dark terminals.
    """
    if color == "logprob":
        depth = min(1.0, -value / 6.0)
        rest = 1 - depth
        return f"{WHITE} on rgb({int(20 + 40 * rest)},{int(30 + 60 * rest)},{int(60 + 150 * depth)})" * (depth > 0.05)
    depth = min(1.0, abs(value) / scale)
    if depth < 0.05:
        return ""
    strong, weak = int(50 + 110 * depth), 35
    return f"{WHITE} on rgb({weak},{strong},{weak})" if value > 0 else f"{WHITE} on rgb({strong},{weak},{weak})"
