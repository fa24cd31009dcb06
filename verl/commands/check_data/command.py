"""`verl check-data`: reads the rows that a configuration names, checks them, and writes a table and a page."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from verl.agent.agent_runner import AgentRunner
from verl.commands.check_data.checks import (
    check_contamination,
    check_duplicates,
    check_leaks,
    check_lengths,
    check_readable,
    check_texts,
    check_tools,
    worst,
)
from verl.commands.check_data.gold import check_gold
from verl.commands.check_data.rows import Split, read_split
from verl.commands.check_data.settings import settings_for
from verl.commands.parsers import data_options
from verl.commands.plan.command import load_run_config
from verl.config import RunConfig
from verl.models.load import load_tokenizer
from verl.observe.check_report import WARNING, WRONG, CheckResult, print_results, write_checks_page
from verl.observe.progress import Progress
from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external
from verl.utils.paths import expand_home


def main(argv: Sequence[str] | None = None) -> int:
    """0: nothing that cannot be right; 1: something is; 2: a mistake the message explains."""
    options, words = data_options(argv)
    config, settings = load_run_config(words), ""
    if options.files:
        config, settings = settings_for(options.files, config)
    with Progress(interval_s=2.0) as progress:
        splits, results = check_rows(config, progress)
    print_results(results, options.examples)
    page = expand_home(options.out, "--out")
    facts = {split.name: f"{split.count:,} rows of {split.source}" for split in splits}
    for level in (WRONG, WARNING):
        facts[level] = str(sum(result.level == level for result in results))
    write_checks_page(page, "Check of the data", facts, results)
    code = worst(results)
    verdict = "something cannot be right" if code else "nothing that cannot be right was found"
    if settings:
        print(f"settings to paste: {settings}")
    print(f"{'; '.join(f'{name}: {fact}' for name, fact in facts.items())}\n{verdict}; {page} has more examples")
    return code


def check_rows(config: RunConfig, progress: Progress) -> tuple[list[Split], list[CheckResult]]:
    """The splits and all results."""
    data = config.data
    progress.stage("loading the tokenizer")
    tokenizer, runner = tokenizer_and_agents(config)
    splits = []
    for name, files, most in (
        ("training", data.train_files, data.train_max_samples),
        ("validation", data.val_files, data.val_max_samples),
    ):
        if files:
            progress.stage(f"reading {name} rows")
            splits.append(read_split(name, files, most, data, tokenizer, progress.count))
    results: list[CheckResult] = []
    for split in splits:
        results.append(check_readable(split))
        if not split.rows:
            continue
        results.append(check_texts(split))
        progress.stage(f"comparing {split.name} prompts")
        results += [*check_duplicates(split), *check_leaks(split)]
        progress.stage(f"measuring {split.name} prompts")
        results += check_lengths(split, config, tokenizer, runner, progress.count)
        results += check_tools(split, config, runner)
        progress.stage(f"scoring gold answers of {split.name}")
        results += check_gold(split, config.reward, progress.count)
    if len(splits) == 2 and all(split.rows for split in splits):
        results.append(check_contamination(*splits))
    return splits, results


def tokenizer_and_agents(config: RunConfig) -> tuple[PreTrainedTokenizerBase | None, AgentRunner | None]:
    """The tokenizer and the agent loops of the run; None where the configuration names no model."""
    model = config.actor_rollout_ref.model
    if not (model.path or model.tokenizer_path):
        if config.data.custom_cls.path:
            raise ConfigError("data.custom_cls needs a tokenizer: set actor_rollout_ref.model.path")
        return None, None
    import_external(model.external_lib)  # may register agent loops
    tokenizer = load_tokenizer(model)
    return tokenizer, AgentRunner(config, tokenizer)
