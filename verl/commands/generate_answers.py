"""`python3 -m verl.trainer.main_generation_server`: answer every prompt of a data file and save the answers.

The output is the input with a column `responses`, a list of `rollout.n` texts per row. Answers are saved
prompt by prompt, so an interrupted run continues where it stopped.
"""

import asyncio
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verl.agent.agent_runner import AgentRunner
from verl.config import RunConfig, load_config
from verl.config.load import pop_unread_keys
from verl.data.data_files import FileRows
from verl.data.prompts import PromptDataset, train_prompts
from verl.trainer.ppo.sources.trajectory_source import first_failure
from verl.utils.command_line import run_command
from verl.utils.errors import ConfigError
from verl.utils.paths import atomic_write_text
from verl.utils.process_end import end_process, say_error
from verl.workers.rollout.base import RolloutEngine, SamplingParams

HELP = f"""{__doc__}
usage: python3 -m verl.trainer.main_generation_server actor_rollout_ref.model.path=DIR \\
    data.train_files=prompts.parquet data.output_path=answers.parquet actor_rollout_ref.rollout.n=4 key=value ...

  data.train_files       prompts, as for training
  data.output_path       where the answers go (.parquet or .jsonl)
  actor_rollout_ref.rollout.*    engine, sampling, response_length, agent loops and tools
"""
MAX_CONCURRENT_PROMPTS = 1024  # prompts given to the engine at once


def main(argv: Sequence[str] | None = None) -> int:
    """0: every prompt is answered; 2: a mistake the message explains; 130: interrupted."""
    return run_command(argv, HELP, run_generation)


def run_generation(overrides: list[str]) -> int:
    """Answer all prompts and print where the answers are; returns the exit code."""
    try:
        print(f"answers: {generate(load_config(overrides))}")
        return 0
    except KeyboardInterrupt:
        say_error("interrupted; the same command goes on where it stopped")
        return 130


def generate(config: RunConfig) -> Path:
    """Answer the prompts of data.train_files; returns the file written."""
    from verl.checks.findings import Findings
    from verl.trainer.ppo.preparation import find_tokenizer_to_generate
    from verl.trainer.ppo.rollout_setup import build_standalone_engine, training_sampling

    if not config.data.output_path:
        raise ConfigError("data.output_path is not set; say where the answers go: data.output_path=answers.parquet")
    output = Path(config.data.output_path)
    if output.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"data.output_path={output} must end in .parquet or .jsonl")
    found = Findings()
    tokenizer = find_tokenizer_to_generate(config, found)
    found.refuse()
    agent_runner = AgentRunner(config, tokenizer)
    prompts = train_prompts(config.data, tokenizer, agent_runner.tool_prompt_tokens)
    rows = FileRows(config.data.train_files)
    if output.suffix == ".parquet" and rows.arrow_table() is None:
        write_table(list(rows), io.BytesIO())  # fails before any prompt is answered if parquet cannot hold the rows
    sampling = training_sampling(config.actor_rollout_ref.rollout)
    journal = output.with_name(output.name + ".parts")
    answers = resume_journal(journal, run_fingerprint(config, prompts, sampling))
    engine = build_standalone_engine(config, tokenizer)
    for key in pop_unread_keys(config):
        print(f"warning: {key} was set, but nothing reads it here", file=sys.stderr)
    try:
        asyncio.run(answer_remaining(engine, agent_runner, prompts, sampling, journal, answers))
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    finally:
        engine.close()
    columns: dict[str, list[Any]] = {config.data.reward_fn_key: [p.data_source for p in prompts]}
    columns["responses"] = [answers[i] for i in range(len(prompts))]
    write_answers(rows, [prompt.index for prompt in prompts], columns, output)
    journal.unlink()
    return output


def write_answers(rows: FileRows, indices: list[int], columns: dict[str, list[Any]], output: Path) -> None:
    """Write the rows at `indices` with `columns`; other columns of parquet files keep their types."""
    table = rows.arrow_table()
    merged = (
        {**rows[index], **dict(zip(columns, values, strict=True))}
        for index, *values in zip(indices, *columns.values(), strict=True)
    )
    if output.suffix == ".jsonl":
        atomic_write_text(output, "".join(json.dumps(row, default=str) + "\n" for row in merged))
        return
    temporary = output.with_name(output.name + ".tmp")
    if table is None:
        write_table(list(merged), temporary)
    else:
        table = (table.drop_columns(["responses"]) if "responses" in table.column_names else table).take(indices)
        for name in columns.keys() - set(table.column_names):
            table = table.append_column(name, [columns[name]])
        pq.write_table(table, temporary)
    temporary.replace(output)


def run_fingerprint(config: RunConfig, prompts: PromptDataset, sampling: SamplingParams) -> dict[str, Any]:
    """Settings that must not change between a run and its continuation, as JSON values."""
    model, rollout, data = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.data
    turns = rollout.multi_turn
    fingerprint = {
        "prompts": [prompts.digest, data.apply_chat_template_kwargs, data.max_prompt_length, data.truncation],
        "model": [model.path, model.lora_adapter_path, model.tokenizer_path, model.custom_chat_template],
        "engine": [rollout.name, rollout.dtype, rollout.server.url, rollout.server.model],
        "sampling": asdict(sampling),
        "agent": [rollout.agent.default_agent_loop, turns.enable, turns.tool_config_path, turns.function_tool_path],
    }
    normalised: dict[str, Any] = json.loads(json.dumps(fingerprint, default=str))
    return normalised


def resume_journal(journal: Path, fingerprint: dict[str, Any]) -> dict[int, list[str]]:
    """The answers in `journal` by prompt position, ready to append to: an incomplete line is dropped, and a new file
    begins with `fingerprint`. ConfigError if a run with another one wrote it."""
    header, *lines = journal.read_text(encoding="utf-8").split("\n") if journal.exists() else [""]
    complete_lines = lines[:-1]  # text after the last newline is an incomplete line
    if not complete_lines:
        atomic_write_text(journal, json.dumps(fingerprint) + "\n")
        return {}
    saved = json.loads(header)
    differs = [name for name in fingerprint if saved.get(name) != fingerprint[name]]
    if differs:
        raise ConfigError(
            f"{journal} holds answers of another run ({differs[0]} differs: {saved.get(differs[0])!r}, now "
            f"{fingerprint[differs[0]]!r}); remove it, or give another data.output_path"
        )
    atomic_write_text(journal, "".join(line + "\n" for line in [header, *complete_lines]))
    return {entry["prompt"]: entry["responses"] for entry in map(json.loads, complete_lines)}


async def answer_remaining(
    engine: RolloutEngine,
    agent_runner: AgentRunner,
    prompts: PromptDataset,
    sampling: SamplingParams,
    journal: Path,
    answers: dict[int, list[str]],
) -> None:
    """Fill in the missing `answers`; append each to `journal` as soon as it is complete."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    await engine.wake()
    unanswered = iter([i for i in range(len(prompts)) if i not in answers])
    with Progress(*columns) as progress, journal.open("a", encoding="utf-8") as lines:
        bar = progress.add_task("prompts answered", total=len(prompts), completed=len(answers))

        async def work() -> None:
            for i in unanswered:  # one iterator for all workers: a free worker takes the next prompt
                trajectories = await agent_runner.answer(prompts[i], i, sampling, engine)
                texts = [agent_runner.tokenizer.decode(t.response_ids, skip_special_tokens=True) for t in trajectories]
                answers[i] = list(map(str, texts))
                lines.write(json.dumps({"prompt": i, "responses": answers[i]}) + "\n")
                lines.flush()
                progress.advance(bar)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(MAX_CONCURRENT_PROMPTS, len(prompts))):
                group.create_task(work())


def write_table(rows: list[dict[str, Any]], target: Any) -> None:
    """`rows` as parquet, with the union of their columns and null for empty objects; ConfigError if parquet cannot hold
    them."""
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        pq.write_table(pa.table({name: [_without_empty(row.get(name)) for row in rows] for name in names}), target)
    except pa.ArrowException as error:
        raise ConfigError(f"the rows cannot be written as parquet ({error}); end data.output_path in .jsonl") from error


def _without_empty(value: Any) -> Any:
    """The nested value with None for objects without keys, which parquet cannot hold."""
    if isinstance(value, dict):
        return {name: _without_empty(inner) for name, inner in value.items()} or None
    return [_without_empty(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    end_process(main)
