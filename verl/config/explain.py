"""`verl config explain`, `verl config print` and docs/reference/config.md, generated from the schema."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config import foreign_keys, schema
from verl.config.algorithm import correction_presets
from verl.config.extra import is_extra
from verl.config.load import load_config, parse_command_line
from verl.config.no_effect import value_at
from verl.config.preference import DPOConfig, RewardModelConfig
from verl.config.run_config import RunConfig
from verl.config.run_name import DATED
from verl.config.sft import SFTConfig
from verl.utils.errors import ConfigError
from verl.utils.process_end import end_process, say_error
from verl.utils.suggest import did_you_mean

PAGE = Path("docs/reference/config.md")
CORRECTION = "algorithm.rollout_correction"
ROOTS = {
    "main_ppo": RunConfig,
    "sft_trainer": SFTConfig,
    "dpo_trainer": DPOConfig,
    "reward_trainer": RewardModelConfig,
}
PRESET_OF_VERB = {"train": "ppo_trainer", "sft": "sft_trainer", "dpo": "dpo_trainer", "reward-model": "reward_trainer"}
ORDINARY_WORDS = {
    **dict.fromkeys(("bf16", "fp16", "fp32", "bfloat16", "precision", "mixed precision"), ("dtype",)),
    **dict.fromkeys(("grad clip", "gradient clipping", "max grad norm"), ("clip_grad",)),
    "learning rate": ("lr",),
    **dict.fromkeys(("max length", "max len", "sequence length", "context length"), ("_length", "model_len")),
    **dict.fromkeys(("batch size", "batchsize"), ("batch_size", "use_dynamic_bsz")),
    **dict.fromkeys(("epochs", "number of epochs"), ("epoch",)),
    **dict.fromkeys(("beta", "kl coefficient"), ("kl_coef", "kl_loss_coef", "beta")),
    **dict.fromkeys(("gpus", "number of gpus"), ("n_gpus", "nnodes", "num_replicas")),
    **dict.fromkeys(("wandb", "tensorboard", "tracker"), ("logger",)),
    **dict.fromkeys(("checkpoint", "save"), ("save_", "ckpt", "resume", "local_dir")),
    **dict.fromkeys(("scheduler", "lr schedule"), ("lr_scheduler_type", "warmup", "min_lr")),
}
"""What people say -> parts of the last names of the keys that are meant."""
USAGE = """verl config explain KEY [KEY ...]        what a key means, its type, default and origin of the default
verl config explain WORD                 the keys that contain a word, in their name or meaning
verl config print [VERB] [key=value ...] the resolved configuration, with the origin of every value
                                         VERB: train, or sft, dpo, reward-model, also after explain
    --changed                            only what differs from the defaults
verl config markdown                     the text of docs/reference/config.md"""

DIFFERENT_DEFAULTS = (
    ("trainer.device", "cuda", "auto", "the platform is detected; a laptop has no cuda"),
    ("trainer.n_gpus_per_node", "8", "null (all devices)", "a laptop has one device"),
    ("trainer.logger", "[console, wandb]", "[console, file]", "no account is needed"),
    ("trainer.experiment_name", "gsm8k; test", "auto: grpo-2026-11-23-1", "a run overwrites no other"),
    ("trainer.v1.sampler.max_off_policy_strategy", "drop", "wait", "slow answers, the long ones, stay in training"),
    ("trainer.v1.separate_async.parameter_sync_step", "4", "null: derived", "batch and mini-batch say it already"),
    ("trainer.save_freq", "-1 (never)", "null: the last step", "the trained model is kept"),
    ("*rollout.name", "required", "native; reward model: null", "nothing to install"),
    ("*rollout.tensor_model_parallel_size", "2", "1", "one device"),
    ("*model.path", "~/models/deepseek-llm-7b-chat", "required; critic: the actor's", "a run must choose its model"),
    ("*fsdp_config.dtype, *fsdp.dtype, engine.dtype, *rollout.dtype", "bfloat16", "auto", "exact on a CPU"),
    ("*.strategy", "fsdp", "fsdp2", "fsdp is an alias of fsdp2; critic.strategy follows the actor's"),
    ("actor_rollout_ref.model.lora.merge", "false", "null: false with vllm", "SGLang takes merged weights alone"),
    ("*checkpoint.save_contents", "without hf_model", "with hf_model", "the result loads in transformers"),
    ("*.use_prefix_grouper", "false", "auto", "a group's prompt needs to be computed once only"),
    ("*.use_dynamic_bsz", "false", "true where no micro-batch size is set", "a run starts without one"),
    ("*.ppo_mini_batch_size", "256", "256, or data.train_batch_size when smaller", "a small batch needs one key"),
    ("*.clip_ratio_low, *.clip_ratio_high", "0.2", "clip_ratio", "clip_ratio then has an effect"),
    (
        "critic.forward_max_token_len_per_gpu",
        "read nowhere",
        "used without gradient",
        "the guides tell users to set it",
    ),
    (
        "data.val_files",
        "~/data/rlhf/gsm8k/test.parquet",
        "null: no validation",
        "no run reads a file that nobody named",
    ),
    ("data.enable_thinking_default", "none", "null", "no value is passed to the template"),
)
"""(key, the reference's default, ours, why); the table of the reference page."""


def main(argv: Sequence[str] | None = None) -> int:
    """`verl config ...`; the exit code."""
    verb, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    verbs = {"explain": explain, "print": print_config, "markdown": print_markdown}
    if verb in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        if verb not in verbs:
            raise ConfigError(f"unknown command 'verl config {verb}'; {did_you_mean(verb, verbs)}")
        return verbs[verb](rest)
    except ConfigError as error:
        say_error(f"error: {error}")
        return 2


def explain(arguments: Sequence[str]) -> int:
    """Print the description of each key; ConfigError when one is unknown."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    tables, paths = list(ROOTS.values()), list(arguments)
    if paths[0] in PRESET_OF_VERB and len(paths) > 1:
        tables.insert(0, ROOTS[PRESET_OF_VERB[paths.pop(0)].replace("ppo_trainer", "main_ppo")])
    if len(paths) > 1 and (lines := keys_with_word(" ".join(paths))):
        print("\n".join(lines))
        return 0
    for path in paths:
        roots = [root for root in tables if foreign_keys.classify(path, root).kind != "unknown"]
        if not roots and (lines := keys_with_word(path)):
            print("\n".join(lines))
            continue
        if not roots:
            raise ConfigError(foreign_keys.unknown_key_message(path, RunConfig))
        print("\n".join(describe(path, roots[0])))
    return 0


def keys_with_word(word: str) -> list[str]:
    """A line for each key that `word` names, in its path or meaning or as people say it, those of fine-tuning marked;
    none for a dotted path.
    """
    lines, plain = [], word.lower().replace("_", " ").replace("-", " ")
    for command, root in ROOTS.items():
        mark = "" if root is RunConfig else f" ({command})"
        for path, key in keys_without_inherited(root).items():
            text = f"{path} {key.doc}".lower().replace("_", " ")
            names = text if plain not in ORDINARY_WORDS else path.rpartition(".")[2]
            wanted = ORDINARY_WORDS.get(plain, (plain,))
            if "." not in word and any(part in names for part in wanted):
                lines.append(f"{path}{mark}: {key.doc}")
    return lines


def keys_without_inherited(root: type) -> dict[str, schema.Key]:
    """The documented keys of a root class; of those that extend SFTConfig, the keys that differ from it."""
    shared = schema.keys(SFTConfig) if issubclass(root, SFTConfig) and root is not SFTConfig else {}
    return {
        path: key
        for path, key in schema.keys(root).items()
        if key.doc and (path not in shared or key.default != shared[path].default)
    }


def describe(path: str, root: type) -> list[str]:
    """Lines about one key or section."""
    rule = foreign_keys.classify(path, root)
    if rule.kind == "alias":
        suffix = ", divided by the number of data-parallel ranks" if rule.per_device else ""
        return [f"{path}: alias of {rule.target}{suffix}", *describe(rule.target, root)]
    if rule.kind == "inert":
        return [f"{path}: inert (accepted, does nothing): {rule.reason}"]
    if rule.kind == "refused":
        text = foreign_keys.not_yet_supported_message("it", rule.reason) if rule.planned else rule.reason
        return [f"{path}: refused: {text}"]
    key = schema.owning_key(path, root)
    if key is None:
        inside = [f"  {p}: {key.doc}" for p, key in schema.keys(root).items() if p.startswith(path + ".") and key.doc]
        presets = preset_lines() if path == CORRECTION else []
        return [f"{path}: section; {schema.sections(root)[path].__doc__}", *inside, *presets]
    lines = [f"{path}: {key.doc}", f"  type      {schema.type_name(key.type)}", f"  default   {default_text(key)}"]
    if key.allowed():
        lines.append(f"  allowed   {key.allowed()}")
    lines += [f"  old name  {old}" for old in aliases_of(key.path, root)]
    if waiting := _waiting_text(key.path, root):
        lines.append(f"  no effect {waiting}")
    for value, feature in foreign_keys.load_foreign_keys(root).planned.get(key.path, {}).items():
        lines.append(f"  later     {value}: {feature}")
    for value, reason in foreign_keys.load_foreign_keys(root).refused_values.get(key.path, {}).items():
        lines.append(f"  never     {value}: {reason}")
    return lines


def preset_lines() -> list[str]:
    """A line for each preset of rollout correction, with the overrides that it stands for."""
    lines = ["  presets, as overrides; RolloutCorrectionConfig.NAME() of verl.trainer.config gives the section:"]
    for name, values in correction_presets().items():
        overrides = " ".join(f"{CORRECTION}.{key}={format_value(value)}" for key, value in values.items())
        lines.append(f"    {name}: {overrides or 'none'}")
    return lines


def _waiting_text(path: str, root: type) -> str:
    """Why a key of the schema has no effect yet; '' for one that is read."""
    group = foreign_keys.waiting_for(path, root)
    if group is None:
        return ""
    while_ = [f"{key}={', '.join(map(str, values))}" for key, values in group.only_while.items()]
    return f"yet: for {group.feature}, still to come" + (f" (with {' and '.join(while_)})" if while_ else "")


def default_text(key: schema.Key) -> str:
    """The default as text: a value, "required", or the key that it follows."""
    if key.path.endswith("model.path") and not key.follows:
        return "required"
    return f"that of {key.follows}" if key.follows else format_value(key.default)


def format_value(value: Any) -> str:
    """A value in the syntax of an override."""
    if isinstance(value, list):
        return "[" + ",".join(format_value(inner) for inner in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{format_value(inner)}" for name, inner in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def aliases_of(path: str, root: type) -> list[str]:
    """Old spellings of a key."""
    return [
        old
        for old, rule in foreign_keys.load_foreign_keys(root).exact.items()
        if rule.kind == "alias" and rule.target == path
    ]


def print_config(arguments: Sequence[str]) -> int:
    """Print every key with its value and the origin of the value."""
    only_changed = "--changed" in arguments
    words = [word for word in arguments if word != "--changed"]
    preset = PRESET_OF_VERB[words.pop(0)] if words and words[0] in PRESET_OF_VERB else "ppo_trainer"
    parse_command_line(words, preset, USAGE)  # answers --help
    config = load_config(words, preset)
    root: type = type(config)
    for path, key in schema.keys(root).items():
        origin = config._origins[path]
        is_as_before = origin in ("default", DATED) or origin.startswith("follows ")
        if not is_as_before or not (only_changed or not key.doc):
            print(f"{path}={format_value(value_at(config, path))}  # {origin}")
    return 0


def print_markdown(arguments: Sequence[str] = ()) -> int:
    """Print the reference page."""
    print(reference_page(), end="")
    return 0


def reference_page() -> str:
    """The text of docs/reference/config.md."""
    lines = [
        "# Configuration reference",
        "",
        "Generated by `verl config markdown > docs/reference/config.md`; do not edit. `verl config explain KEY` prints",
        "one key, `verl config print key=value ...` the resolved values with their origins.",
        "",
        "A key is read (tables below), an alias, inert or refused (lists at the end). Any other key is an error.",
        "",
        "## Defaults that differ from the reference",
        "",
        "| key | reference | here | why |",
        "|---|---|---|---|",
        *(f"| `{key}` | {theirs} | {ours} | {why} |" for key, theirs, ours, why in DIFFERENT_DEFAULTS),
    ]
    for command, root in ROOTS.items():
        lines += ["", f"## Keys of `python3 -m verl.trainer.{command}`"]
        extends = issubclass(root, SFTConfig) and root is not SFTConfig
        lines += ["", "Those of `sft_trainer`, and these, new or with another default:"] if extends else []
        for path, cls in schema.sections(root).items():
            lines += _section_lines(path, cls, root)
        lines += [] if extends else ["", f"## Other keys of `{command}`", "", *_foreign_lines(root)]
    return "\n".join(lines) + "\n"


def _section_lines(path: str, cls: type, root: type) -> list[str]:
    keys = [key for key in keys_without_inherited(root).values() if key.path.rpartition(".")[0] == path]
    keys.sort(key=lambda key: is_extra(key.path))
    if not keys:
        return []
    doc = (cls.__doc__ or "").strip()
    lines = ["", f"### {path or 'root'}", "", doc, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = default_text(key).replace("|", "\\|")
        limits = f" Allowed: {key.allowed()}." if key.allowed() else ""
        if waiting := _waiting_text(key.path, root):
            limits += f" No effect {waiting}."
        name = key.path.rpartition(".")[2]
        lines.append(f"| `{name}` | {schema.type_name(key.type)} | `{default}` | {key.doc}{limits} |")
    return lines


def _foreign_lines(root: type) -> list[str]:
    table = foreign_keys.load_foreign_keys(root)
    every = [*table.exact.items(), *table.patterns]
    lines = ["| old spelling | key |", "|---|---|"]
    for path, rule in every:
        if rule.kind == "alias":
            lines.append(f"| `{path}` | `{rule.target}`{' / ranks' if rule.per_device else ''} |")
    lines += ["", "| key without effect | why |", "|---|---|"]
    lines += [f"| `{path}` | {rule.reason} |" for path, rule in every if rule.kind == "inert"]
    lines += ["", "| refused | keys |", "|---|---|"]
    groups: dict[str, list[str]] = {}
    for path, rule in every:
        if rule.kind == "refused":
            reason = f"{rule.reason} (still to come)" if rule.planned else rule.reason
            groups.setdefault(reason, []).append(f"`{path}`")
    return [*lines, *(f"| {reason} | {', '.join(paths)} |" for reason, paths in groups.items())]


if __name__ == "__main__":
    end_process(main)
