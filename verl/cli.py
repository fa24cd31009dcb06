"""The `verl` command: each verb imports one module, when it is called, and runs its function."""

import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import NoReturn

from verl import __version__
from verl.utils.errors import VerlError
from verl.utils.process_end import end_process
from verl.utils.suggest import did_you_mean

VERBS: dict[str, tuple[str, str]] = {
    "quickstart": ("verl.commands.quickstart:main", "make a small model and task, train it, show before and after"),
    "train": ("verl.trainer.main_ppo:main", "reinforcement learning: PPO, GRPO and relatives"),
    "sft": ("verl.trainer.sft_trainer:main", "supervised fine-tuning"),
    "dpo": ("verl.trainer.dpo_trainer:main", "preference optimization on pairs of answers: DPO, IPO, hinge, SimPO"),
    "reward-model": ("verl.trainer.reward_trainer:main", "a reward model from pairs of answers"),
    "merge": ("verl.commands.parsers:merge_main", "turn the shards of a checkpoint into a Hugging Face folder"),
    "generate": ("verl.commands.generate_answers:main", "answer the prompts of a data file"),
    "eval": ("verl.commands.score_answers:main", "score a file of answers: accuracy, pass@k, maj@k with intervals"),
    "serve": ("verl.commands.serve:main", "an OpenAI-compatible server over a rollout engine"),
    "report": ("verl.commands.report:main", "one page about a run, or several over each other, also while they train"),
    "show": ("verl.commands.show:main", "trajectories of a step as text, tokens coloured by advantage or log-prob"),
    "config": ("verl.config.explain:main", "explain a key, print the resolved configuration"),
    "plan": ("verl.commands.plan.command:main", "which role sits on which devices, and what it holds in memory"),
    "doctor": ("verl.commands.doctor:main", "what this machine can and cannot do"),
    "check-template": ("verl.commands.parsers:template_main", "check that a chat template works for multi-turn runs"),
    "check-data": (
        "verl.commands.parsers:data_main",
        "check the rows of a run: duplicates, leaks, lengths, gold answers",
    ),
    "check-reward": (
        "verl.commands.parsers:reward_main",
        "check the reward of a run: gold and bad answers, threads, processes, time",
    ),
    "certify": ("verl.commands.certify:main", "check that gradients do not depend on how a batch is split"),
}
SPEAKS_FIRST = (
    "train",
    "sft",
    "dpo",
    "reward-model",
    "config",
    "report",
    "plan",
)  # these print before they load what is slow


def usage() -> str:
    """The text of `verl --help`."""
    verbs = "\n".join(f"  {verb:<16}{text}" for verb, (_, text) in VERBS.items())
    return f"verl {__version__}\n\nusage: verl VERB [arguments]\n\n{verbs}\n\n`verl VERB --help` explains one verb."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; 2: a mistake the message explains. 130: Ctrl-C, also while it loads."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("error: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout.fileno()):
            raise  # it was another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has read enough
        return 0


def _nobody_reads(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: Sequence[str] | None) -> int:
    verb, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(usage())
        return 0
    if verb in ("-V", "--version"):
        print(__version__)
        return 0
    if verb not in VERBS:
        print(f"error: unknown verb {verb!r}; {did_you_mean(verb, VERBS)}", file=sys.stderr)
        return 2
    if verb not in SPEAKS_FIRST and not {"-h", "--help", "--json"} & set(arguments):
        print(f"verl {verb}: loading libraries", file=sys.stderr, flush=True)  # they take seconds
    module_name, _, function = VERBS[verb][0].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        print(f"error: `verl {verb}` is not part of this version yet", file=sys.stderr)
        return 2
    try:
        return int(getattr(module, function)(arguments) or 0)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def command() -> NoReturn:
    """The process of a `verl` command."""
    end_process(main())


if __name__ == "__main__":
    command()
