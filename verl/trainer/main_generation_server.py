"""`python3 -m verl.trainer.main_generation_server`: answer every prompt of a data file and write the answers down.

The output is the input with a column `responses`, a list of `rollout.n` texts per row. Answers are written part by
part, so a run that was cut off goes on where it stopped.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verl.config import RunConfig, load_config
from verl.data.prompts import PromptDataset, train_prompts
from verl.data.rows import FileRows
from verl.utils.command import command
from verl.utils.errors import ConfigError
from verl.utils.paths import atomic_write_text
from verl.workers.rollout.base import GenerationRequest, RolloutEngine, SamplingParams

HELP = f"""{__doc__}
usage: python3 -m verl.trainer.main_generation_server actor_rollout_ref.model.path=DIR \\
    data.train_files=prompts.parquet data.output_path=answers.parquet actor_rollout_ref.rollout.n=4 key=value ...

  data.train_files       prompts, as for training
  data.output_path       where the answers go (.parquet or .jsonl)
  actor_rollout_ref.rollout.*    engine, sampling, response_length
"""
_SAMPLING = ("name", "n", "temperature", "top_p", "top_k", "do_sample", "seed", "response_length")
PART = 256  # prompts whose answers are written together


def main(argv: Sequence[str] | None = None) -> int:
    """0: every prompt is answered; 2: a mistake the message explains."""
    return command(argv, HELP, lambda words: print(f"answers: {generate(load_config(words))}"))


def generate(config: RunConfig) -> Path:
    """Answer the prompts of data.train_files; returns the file written."""
    from verl.models.load import load_tokenizer
    from verl.trainer.ppo.rollout import load_engine, training_sampling

    if not config.data.output_path:
        raise ConfigError("data.output_path is not set; say where the answers go: data.output_path=answers.parquet")
    output = Path(config.data.output_path)
    if output.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"data.output_path={output} must end in .parquet or .jsonl")
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    prompts = train_prompts(config.data, tokenizer)
    parts = output.with_name(output.name + ".parts")
    sampling = training_sampling(config.actor_rollout_ref.rollout)
    check_same_run(parts, fingerprint(config, prompts))
    engine = load_engine(config, tokenizer)
    try:
        asyncio.run(answer_parts(engine, prompts, sampling, tokenizer, parts))
    finally:
        engine.close()
    merge(config, prompts, parts, output)
    return output


def fingerprint(config: RunConfig, prompts: PromptDataset) -> dict[str, Any]:
    """What must not change between a run and its continuation."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "prompts": prompts.digest,
        "model": str(config.actor_rollout_ref.model.path),
        "sampling": [getattr(rollout, name) for name in _SAMPLING],
    }


def check_same_run(parts: Path, expected: dict[str, Any]) -> None:
    """Begin `parts`, or make sure that they belong to this very run."""
    parts.mkdir(parents=True, exist_ok=True)
    note = parts / "run.json"
    if not note.exists():
        atomic_write_text(note, json.dumps(expected))
        return
    found = json.loads(note.read_text(encoding="utf-8"))
    differs = [name for name in expected if found.get(name) != expected[name]]
    if differs:
        raise ConfigError(
            f"{parts} holds answers of another run ({differs[0]} differs: {found.get(differs[0])!r}, now "
            f"{expected[differs[0]]!r}); remove that folder, or give another data.output_path"
        )


async def answer_parts(
    engine: RolloutEngine, prompts: PromptDataset, sampling: SamplingParams, tokenizer: Any, parts: Path
) -> None:
    """Every part that is not there yet; each is written whole or not at all."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    await engine.wake()
    with Progress(*columns) as progress:
        bar = progress.add_task("prompts answered", total=len(prompts))

        async def one(position: int, request: GenerationRequest) -> list[str]:
            completions = await engine.generate(request)
            progress.advance(bar)
            return [str(tokenizer.decode(c.token_ids, skip_special_tokens=True)) for c in completions]

        for start in range(0, len(prompts), PART):
            path = parts / f"{start:09d}.json"
            positions = range(start, min(start + PART, len(prompts)))
            if path.exists():
                progress.advance(bar, len(positions))
                continue
            rows = prompts.rows(positions)
            requests = [GenerationRequest(p, row.prompt_ids, sampling) for p, row in zip(positions, rows, strict=True)]
            answers = await asyncio.gather(*(one(p, r) for p, r in zip(positions, requests, strict=True)))
            text = json.dumps([{"row": row.index, "responses": a} for row, a in zip(rows, answers, strict=True)])
            atomic_write_text(path, text)


def merge(config: RunConfig, prompts: PromptDataset, parts: Path, output: Path) -> None:
    """The input rows with their answers as one file; then the parts go."""
    answers = [entry for path in sorted(parts.glob("[0-9]*.json")) for entry in json.loads(path.read_text("utf-8"))]
    rows = FileRows(config.data.train_files)
    merged = [{**rows[entry["row"]], "responses": entry["responses"]} for entry in answers]
    temporary = output.with_name(output.name + ".tmp")
    if output.suffix == ".jsonl":
        atomic_write_text(output, "".join(json.dumps(row, default=str) + "\n" for row in merged))
    else:
        pq.write_table(pa.Table.from_pylist(merged), temporary)
        temporary.replace(output)
    for path in parts.iterdir():
        path.unlink()
    parts.rmdir()


if __name__ == "__main__":
    sys.exit(main())
