"""`verl check-template`: see TEMPLATE_HELP in `verl.commands.parsers`."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from verl.agent.incremental_template import IncrementalTemplate
from verl.commands.parsers import template_options
from verl.config import HFModelConfig
from verl.config.special_files import refuse_special
from verl.data.chat import Message
from verl.models.load import load_tokenizer
from verl.utils.errors import ConfigError
from verl.utils.paths import expand_home
from verl.utils.process_end import end_process

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
FUZZ_WORDS = (
    "hello",
    "2+3",
    " leading",
    "trailing ",
    "naïve",
    "日本",
    "🙂",
    "a\nb",
    "{x}",
    "<b>",
    "\ttab",
    "it's",
    "…",
    "0.5%",
)
THINKING = "<think>\nstep by step\n</think>\n\n"


@dataclass
class TemplateReport:
    """Result of the checks. `problems` make multi-turn training wrong; `notes` are handled."""

    conversations: int = 0
    checks_reached: set[str] = field(default_factory=set)  # checks that were reached
    problems: dict[str, str] = field(default_factory=dict)  # check -> first example
    notes: dict[str, str] = field(default_factory=dict)
    shortest_example: tuple[list[int], list[bool]] = field(default_factory=lambda: ([], []))

    @property
    def passed(self) -> bool:
        return not self.problems

    def keep_shortest(self, ids: list[int], mask: list[bool]) -> None:
        if not self.shortest_example[0] or len(ids) < len(self.shortest_example[0]):
            self.shortest_example = (ids, mask)


def check_template(
    tokenizer: PreTrainedTokenizerBase, conversations: int = 100, seed: int = 0, **template_kwargs: Any
) -> TemplateReport:
    """Report on the tokenizer's chat template from `conversations` random conversations."""
    if not tokenizer.chat_template:
        raise ConfigError("this tokenizer has no chat template; give one, or train on single turns of plain text")
    report, rng = TemplateReport(conversations), random.Random(seed)
    for _ in range(conversations):
        tools = [TOOL] if rng.random() < 0.5 else []
        _check_conversation(
            IncrementalTemplate(tokenizer, tools, template_kwargs=template_kwargs),
            _random_conversation(rng, bool(tools)),
            report,
        )
    return report


def _random_text(rng: random.Random) -> str:
    return " ".join(rng.choice(FUZZ_WORDS) for _ in range(rng.randint(1, 5))).strip() or "x"


def _random_conversation(rng: random.Random, tools: bool) -> list[Message]:
    """System and user turns, answers with and without thinking, tool results."""
    messages: list[Message] = [{"role": "system", "content": _random_text(rng)}] if rng.random() < 0.5 else []
    messages.append({"role": "user", "content": _random_text(rng)})
    for _ in range(rng.randint(1, 3)):
        thought = THINKING if rng.random() < 0.5 else ""
        messages.append({"role": "assistant", "content": thought + _random_text(rng)})
        if tools and rng.random() < 0.5:  # results of one call, or of several parallel calls
            results = [
                {"role": "tool", "name": "look_up", "content": _random_text(rng)} for _ in range(rng.randint(1, 3))
            ]
            messages += results
        else:
            messages.append({"role": "user", "content": _random_text(rng)})
    return messages


def _check_conversation(template: IncrementalTemplate, messages: list[Message], report: TemplateReport) -> None:
    """Render one conversation turn by turn, as a rollout does, and compare it with whole renderings."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    check_name = f"{messages[0]['role']} turns can be rendered"
    report.checks_reached.add(check_name)
    try:
        ids = template.initial_tokens(messages[: answers[0]])
    except (TemplateError, TypeError, ValueError) as error:
        findings = report.notes if messages[0]["role"] == "system" else report.problems
        findings.setdefault(check_name, f"{type(error).__name__}: {error}")
        return
    mask = [False] * len(ids)
    rewritten = False
    for i, end in zip(answers, [*answers[1:], len(messages)], strict=True):
        next_turns, ends = messages[i + 1 : end], template.end_token_ids
        sampled = template.tokenizer(str(messages[i]["content"]), add_special_tokens=False)["input_ids"]
        report.checks_reached.update(("an answer ends with a mark", f"{next_turns[0]['role']} turns can be appended"))
        if not ends:
            report.problems.setdefault("an answer ends with a mark", "the tokenizer has no end-of-sequence token")
            return
        ids, mask = ids + sampled + [ends[-1]], mask + [True] * (len(sampled) + 1)
        try:
            new = template.appended_tokens(next_turns, ids)
        except ConfigError as error:
            report.problems.setdefault(f"{next_turns[0]['role']} turns can be appended", str(error))
            return
        ids, mask = ids + new, mask + [False] * len(new)
        rewritten = rewritten or not _prefix_unchanged(template, messages[:end], i, report)
    report.keep_shortest(ids, mask)
    if not rewritten:
        _compare_renderings(template, ids, messages, report)


def _prefix_unchanged(
    template: IncrementalTemplate, messages: list[Message], answer: int, report: TemplateReport
) -> bool:
    """Whether the rendering up to the last answer is a prefix of the rendering with the turns after it."""
    report.checks_reached.add("earlier turns are left alone")
    before = template.render(messages[:answer], True) + str(messages[answer]["content"])
    after = template.render(messages, True)
    if after.startswith(before):
        return True
    place = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    report.notes.setdefault(
        "earlier turns are left alone",
        f"…{before[max(0, place - 30) : place + 30]!r} becomes {after[max(0, place - 30) : place + 30]!r} when a "
        f"{messages[-1]['role']} turn follows. Rollouts keep what was sampled",
    )
    return False


def _compare_renderings(
    template: IncrementalTemplate, ids: list[int], messages: list[Message], report: TemplateReport
) -> None:
    """Compare incremental ids with the template's own rendering of the whole conversation."""
    report.checks_reached.update(
        ("incremental turns equal the template's rendering", "tokens of a rendering are those of its parts")
    )
    rendered_ids = template.tokenize(template.render(messages, True))
    built = str(template.tokenizer.decode(ids))
    rendered = str(template.tokenizer.decode(rendered_ids))
    if built != rendered:
        place = next((i for i, (a, b) in enumerate(zip(built, rendered, strict=False)) if a != b), 0)
        report.problems.setdefault(
            "incremental turns equal the template's rendering",
            f"incremental {built[max(0, place - 20) : place + 40]!r}, rendered {rendered[max(0, place - 20) :][:60]!r}",
        )
    elif ids != rendered_ids:
        report.notes.setdefault(
            "tokens of a rendering are those of its parts",
            "the same text splits into other tokens when rendered whole. Rollouts keep the tokens that were sampled",
        )


CHECKS = (
    "user turns can be rendered",
    "system turns can be rendered",
    "an answer ends with a mark",
    "user turns can be appended",
    "tool turns can be appended",
    "incremental turns equal the template's rendering",
    "earlier turns are left alone",
    "tokens of a rendering are those of its parts",
)


def print_report(report: TemplateReport, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print the table of checks and the shortest conversation with its trained tokens in colour."""
    table = Table("check", "result", "example")
    for check in CHECKS:
        if check in report.problems:
            table.add_row(check, Text("no", style="bold red"), Text(report.problems[check]))
        elif check in report.notes:
            handled = "no" if check.startswith("system") else "no, handled"
            table.add_row(check, Text(handled, style="yellow"), Text(report.notes[check]))
        else:
            table.add_row(check, Text("yes", style="green") if check in report.checks_reached else "not reached", "")
    console.print(table)
    if report.shortest_example[0]:
        line = Text()
        for token, trained in zip(*report.shortest_example, strict=True):
            line.append(str(tokenizer.decode([token])), style="bold green" if trained else "dim")
        console.print("One conversation; trained tokens are in bold green:")
        console.print(line)


def main(argv: Sequence[str] | None = None) -> int:
    """0: multi-turn training works on this template; 1: it does not; 2: a mistake the message explains."""
    options = template_options(argv)
    if options.conversations < 1:
        raise ConfigError(f"--conversations {options.conversations}: give at least 1")
    try:
        template = None
        if options.chat_template:
            file = refuse_special(expand_home(options.chat_template, "--chat-template"), "--chat-template")
            template = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {options.chat_template}: {error.strerror}; give a file") from error
    tokenizer = load_tokenizer(HFModelConfig(path=options.path, custom_chat_template=template))
    report = check_template(tokenizer, options.conversations, options.seed)
    console = Console()
    print_report(report, tokenizer, console)
    verdict = "works" if report.passed else "would be wrong"
    console.print(f"{report.conversations} random conversations: multi-turn training on this template {verdict}.")
    return 0 if report.passed else 1


if __name__ == "__main__":
    end_process(main)
