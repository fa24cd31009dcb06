"""The checks of prompts: duplicates, leaked answers, lengths, tools. docs/rewards/check_data.md has the rules."""

import json
import re
from collections.abc import Sequence
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from verl.agent.agent_runner import AgentRunner
from verl.commands.check_data.rows import Count, Row, Split
from verl.config import RunConfig
from verl.data.chat import PromptTemplate
from verl.data.prompt_rows import WRITTEN_LIST, holds_messages, lacks_tool_arguments
from verl.observe.check_report import GOOD, SKIPPED, WARNING, WRONG, CheckResult
from verl.rewards.gold_answers import gold_texts
from verl.utils.errors import ConfigError

SHARE_WRONG = 0.01  # of the rows: what may be chance below is wrong above
LONG = 20  # characters of a gold answer that is not in a prompt by chance
CHUNK = 512  # prompts tokenised together
EXAMPLES = 10  # kept of each check
MARKS = r"(?:####|\\boxed\s*\{|<answer>|\banswer\s*(?:is|:|=))\s*\$?"
Examples = list[tuple[str, str]]


def found(
    check: str, examples: Examples, total: int, text: str, level: str | None = None, note: str = ""
) -> CheckResult:
    """The result of a check, from (where, what) of every row that it found; without a level, a warning up to
    SHARE_WRONG of the rows, then wrong."""
    if not examples:
        return CheckResult(check, GOOD, f"none of {total:,} rows", note=note)
    level = level or (WRONG if len(examples) > SHARE_WRONG * total else WARNING)
    return CheckResult(check, level, f"{len(examples):,} of {total:,} {text}", examples[:EXAMPLES], note)


def check_readable(split: Split) -> CheckResult:
    text = "rows are refused by a run; repair them or take them out of the file"
    return found(f"{split.name}: rows a run can read", split.refused, split.count, text, WRONG)


def check_texts(split: Split) -> CheckResult:
    texts = [(row.where, short(row.text)) for row in split.rows if holds_messages(row.messages[-1].get("content"))]
    return found(f"{split.name}: prompts as text", texts, len(split.rows), f"rows {WRITTEN_LIST}", WARNING)


def check_duplicates(split: Split) -> list[CheckResult]:
    """Repeated prompts of one split, exact and in normal form; repeated prompts with different ground truths."""
    results = []
    exact: dict[str, Row] = {}
    normal: dict[str, Row] = {}
    repeats, similar, contradictions = Examples(), Examples(), Examples()
    for row in split.rows:
        first, alike = exact.setdefault(row.text, row), normal.setdefault(row.normal_text, row)
        if first is not row:
            repeats.append((row.where, f"as {first.where}: {short(row.text)}"))
            if truth(first) != truth(row):
                contradictions.append((row.where, f"{truth(row)}, but {truth(first)} in {first.where}"))
        elif alike is not row:
            similar.append((row.where, f"like {alike.where}: {short(row.text)}"))
    total = len(split.rows)
    for check, text, examples in (
        ("repeated prompts", "rows repeat the prompt of an earlier row", repeats),
        ("nearly repeated prompts", "rows differ from an earlier row in case, spaces or punctuation only", similar),
        ("one prompt, two answers", "rows repeat an earlier prompt and have another ground truth", contradictions),
    ):
        results.append(found(f"{split.name}: {check}", examples, total, text, WARNING))
    return results


def check_contamination(train: Split, validation: Split) -> CheckResult:
    """Prompts of the validation rows that are training prompts."""
    exact = {row.text: row for row in train.rows}
    normal = {row.normal_text: row for row in train.rows}
    examples, same = Examples(), 0
    for row in validation.rows:
        if other := exact.get(row.text) or normal.get(row.normal_text):
            same += other.text == row.text
            examples.append((row.where, f"as {other.where}: {short(row.text)}"))
    text = (
        f"validation rows have a prompt of a training row ({same:,} exactly, the others but for case and punctuation)"
    )
    return found("validation prompts in training", examples, len(validation.rows), text)


def check_leaks(split: Split) -> list[CheckResult]:
    """Prompts that give their answer away. What all prompts begin with (instructions, worked examples) is left out."""
    marked, long, chance = Examples(), Examples(), 0
    texts = [row.text for row in split.rows]
    pairs = zip(min(texts), max(texts), strict=False)  # the least alike
    skip = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) if len(set(texts)) > 1 else 0
    for row, text in zip(split.rows, texts, strict=True):
        text = text[text.rfind(" ", 0, skip) + 1 if skip else 0 :]
        if row.solution and len(row.solution) >= LONG and row.solution.strip() in text:
            marked.append((row.where, f"the whole solution is in the prompt: {short(row.solution)}"))
            continue
        for gold in gold_texts(row.ground_truth):
            word = rf"(?<![\w.]){re.escape(gold)}(?!\w|[.,]\d)"
            if gold.casefold() not in text.casefold() or not re.search(word, text, re.IGNORECASE):
                continue
            if place := re.search(MARKS + word, text, re.IGNORECASE):
                marked.append((row.where, f"…{' '.join(text[max(0, place.start() - 40) : place.end() + 10].split())}…"))
            elif len(gold) >= LONG:
                long.append((row.where, short(gold)))
            else:
                chance += 1
            break
    note = f"{chance:,} hold one of less than {LONG} characters, perhaps by chance"
    text, total = "prompts hold their answer marked as such, or the whole solution", len(split.rows)
    results = [found(f"{split.name}: prompts with their answer", marked, total, text, note=note)]
    text = f"prompts hold a gold answer of {LONG} characters or more"
    return [*results, found(f"{split.name}: prompts with a long answer", long, total, text, WARNING)]


def check_lengths(
    split: Split,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    runner: AgentRunner | None,
    count: Count,
) -> list[CheckResult]:
    """Prompts against data.max_prompt_length, with what a run does to longer ones; solutions against the answer's."""
    data, check = config.data, f"{split.name}: prompt length"
    if tokenizer is None:
        return [CheckResult(check, SKIPPED, "no tokenizer: set actor_rollout_ref.model.path")]
    lengths: list[int] = []
    template = PromptTemplate(tokenizer, data.apply_chat_template_kwargs)
    for start in range(0, len(split.rows), CHUNK):
        lengths += map(len, template.encode([row.rendered for row in split.rows[start : start + CHUNK]]))
        count(f"{len(lengths):,} of {len(split.rows):,} prompts")
    tools = {name: _tool_tokens(runner, name) for name in {row.agent_name for row in split.rows}}
    lengths = [length + tools[row.agent_name] for length, row in zip(lengths, split.rows, strict=True)]
    limit, stops = data.max_prompt_length, data.truncation == "error" and not data.filter_overlong_prompts
    fate = (
        "are removed (data.filter_overlong_prompts)" if data.filter_overlong_prompts else f"are cut {data.truncation}"
    )
    overlong = [(length, row) for length, row in zip(lengths, split.rows, strict=True) if length > limit]
    examples = [(row.where, f"{length} tokens: {short(row.text)}") for length, row in sorted(overlong, key=longest)]
    text = f"prompts are longer than data.max_prompt_length={limit} and {'stop the run' if stops else fate}"
    level, size = WRONG if stops else WARNING, sorted(lengths)
    note = f"{size[0]} to {size[-1]} tokens, median {size[len(size) // 2]}, p99 {size[len(size) * 99 // 100]}"
    prompts = found(check, examples, len(lengths), text, level, f"{note}, limit {limit}")
    return [prompts, check_solution_lengths(split, data.max_response_length, tokenizer)]


def longest(item: tuple[int, Row]) -> int:
    return -item[0]


def check_solution_lengths(split: Split, limit: int, tokenizer: PreTrainedTokenizerBase) -> CheckResult:
    solved = [row for row in split.rows if row.solution]
    ids = tokenizer([str(row.solution) for row in solved], add_special_tokens=False)["input_ids"] if solved else []
    too_long = [(r.where, f"{len(i)} tokens") for r, i in zip(solved, ids, strict=True) if len(i) > limit]
    text = f"gold solutions are longer than data.max_response_length={limit}"
    return found(f"{split.name}: solution length", too_long, len(solved), text, WARNING)


def check_tools(split: Split, config: RunConfig, runner: AgentRunner | None) -> list[CheckResult]:
    """Rows that need tools and have no arguments for them; loops and tools that the run does not have."""
    rows, total = split.rows, len(split.rows)
    without = [(r.where, "no tools_kwargs") for r in rows if lacks_tool_arguments(r.extra_info, config.data)]
    text = "rows need tools (need_tools_kwargs) and have no extra_info.tools_kwargs"
    results = [found(f"{split.name}: arguments of tools", without, total, text, WRONG)]
    if runner is None:
        return [*results, CheckResult(f"{split.name}: agent loops and tools", SKIPPED, "no tokenizer")]
    unknown, missing = Examples(), Examples()
    loops = {name: _loop_error(runner, name) for name in {row.agent_name for row in rows}}
    for row in rows:
        if error := loops[row.agent_name]:
            unknown.append((row.where, error))
        wanted = {name for name, value in (row.extra_info.get("tools_kwargs") or {}).items() if value}
        if lacking := sorted(wanted - set(runner.tools)):
            missing.append((row.where, f"{', '.join(lacking)}; the run has {', '.join(runner.tools) or 'no tools'}"))
    text = "rows name an agent loop that the run does not have"
    results.append(found(f"{split.name}: agent loops", unknown, total, text, WRONG))
    text = "rows have arguments of tools that the run does not have (actor_rollout_ref.rollout.multi_turn)"
    return [*results, found(f"{split.name}: tools", missing, total, text, WARNING)]


def _tool_tokens(runner: AgentRunner | None, name: str | None) -> int:
    """Tokens that the descriptions of tools add to a prompt."""
    return runner.tool_prompt_tokens(name) if runner and not _loop_error(runner, name) else 0


def _loop_error(runner: AgentRunner, name: str | None) -> str:
    try:
        runner.loop(runner.loop_name(name))
    except ConfigError as error:
        return str(error)
    return ""


def truth(row: Row) -> str:
    return json.dumps(row.ground_truth, ensure_ascii=False, default=str)


def short(text: str, length: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def worst(results: Sequence[CheckResult]) -> int:
    """The exit code: 1 where something cannot be right."""
    return int(any(result.level == WRONG for result in results))
