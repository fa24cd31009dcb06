"""Arguments of commands that load libraries for seconds; `mains` reads them before that."""

import argparse
import sys
from collections.abc import Sequence

TEMPLATE_HELP = """Check that a chat template works for multi-turn training, and show which tokens are trained.

Random conversations are rendered turn by turn. Three things must hold: an answer ends with an end-of-sequence token;
tool and user turns can be appended; the incremental tokens equal the template's own rendering of the conversation,
unless the template rewrites earlier turns. Templates that rewrite earlier turns are reported with an example."""

DATA_HELP = """Check the rows of a run before it trains on them: the arguments are those of the run.

Checked are rows that a run refuses, repeated prompts in and across the files, prompts that hold their answer, lengths
against the limits, data sources without a scorer, gold answers that the reward rejects, and rows that need tools."""
DATA_EPILOG = """  verl check-data train.csv     prints the settings with which a run reads the file, and checks it
  verl check-data data.train_files=train.parquet data.val_files=test.parquet \\
      actor_rollout_ref.model.path=DIR data.max_prompt_length=512 data.max_response_length=1024

Exit code: 0 nothing that cannot be right (there may be warnings), 1 something is wrong, 2 the check cannot run.
docs/rewards/check_data.md has the rules."""


REWARD_HELP = """Check the reward of a run before a policy learns from it: the arguments are those of the run.

Answers to some of its rows are scored: gold answers, which must score high, and empty, random and truncated ones and
the gold answers of other rows, which must score low. The same answers are scored again, from threads, and in other
processes, where they must get the same scores. Time and memory of the calls are measured."""
REWARD_EPILOG = """  verl check-reward data.train_files=train.parquet reward.custom_reward_function.path=my_reward.py

Exit code: 0 nothing that cannot be right (there may be warnings), 1 something is wrong, 2 the check cannot run.
A row costs about 25 calls, and a plain function 1,000 more for memory. docs/rewards/check_reward.md has the rules."""


def merge_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `verl merge`; an operation that is left out is `merge`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    has_operation = not arguments or arguments[0] in ("merge", "test", "-h", "--help")
    return merge_parser().parse_args(arguments if has_operation else ["merge", *arguments])


def merge_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl merge", description="Turn the shards of a checkpoint into one model.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--backend", default="fsdp", choices=("fsdp", "megatron"), help="what trained the model")
    common.add_argument("--local_dir", required=True, help="folder of shards, such as global_step_N/actor")
    common.add_argument("--is-value-model", action="store_true", help="a critic, whatever its config.json says")
    common.add_argument("--tie-word-embedding", action="store_true", help="head and embedding are one tensor")
    common.add_argument("--trust-remote-code", action="store_true", help="refused")
    common.add_argument("--use_cpu_initialization", action="store_true", help="accepted; always true")
    verbs = parser.add_subparsers(dest="operation", required=True)
    merging = verbs.add_parser("merge", parents=[common], help="write a Hugging Face folder")
    merging.add_argument("--target_dir", help="new or empty folder to write (default: EXPERIMENT-step-N)")
    merging.add_argument("--hf_upload_path", help="repository on a hub to upload the folder to")
    merging.add_argument("--private", action="store_true", help="make that repository private")
    testing = verbs.add_parser("test", parents=[common], help="compare the shards with a Hugging Face folder")
    testing.add_argument("--test_hf_dir", required=True, help="the folder to compare with")
    return parser


def template_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `verl check-template`."""
    parser = argparse.ArgumentParser(prog="verl check-template", description=TEMPLATE_HELP)
    parser.add_argument("path", help="folder of the model or tokenizer")
    parser.add_argument("--conversations", type=int, default=200, help="random conversations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the conversations (default: %(default)s)")
    parser.add_argument("--chat-template", help="file with a template to check instead of the tokenizer's own")
    return parser.parse_args(argv)


def data_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of `verl check-data`, with the data `files` among them, and the overrides."""
    parser = argparse.ArgumentParser("verl check-data", description=DATA_HELP, epilog=DATA_EPILOG, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", default="check_data.html", help="the page to write (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=3, help="examples of a check to print (default: %(default)s)")
    options, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    pairs = zip(["", *words], words, strict=False)  # a word behind an option is its value
    options.files = [word for before, word in pairs if not ("=" in word or word[:1] in "-+~" or before[:2] == "--")]
    return options, [word for word in words if word not in options.files]


def reward_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of `verl check-reward`, and the overrides among them."""
    parser = argparse.ArgumentParser(
        "verl check-reward", description=REWARD_HELP, epilog=REWARD_EPILOG, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--rows", type=int, help="rows to take by chance (default: 64, or 8 where a call may cost money)")
    add("--seed", type=int, help="seed of that choice (default: by chance; it is printed)")
    add("--gold-key", metavar="KEY", help="where a row has its gold answer as text, such as extra_info.solution")
    add("--html", default="check_reward.html", metavar="PATH", help="the page to write (default: %(default)s)")
    add("--examples", type=int, default=3, help="examples of a check to print (default: %(default)s)")
    return parser.parse_known_args(sys.argv[1:] if argv is None else argv)
