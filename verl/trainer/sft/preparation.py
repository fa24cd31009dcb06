"""Everything of a fine-tuning run that can be read and checked before its ranks start."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from verl.checks.findings import Findings
from verl.checks.loaded import TrainedModel, check_disk_room, find_device, find_tokenizer, warn_of_narrow_parameters
from verl.config import SFTConfig
from verl.data.conversations import Conversations
from verl.trainer.sft.objectives import objective_of
from verl.trainer.sft.ranks import num_ranks_to_start
from verl.utils.external_code import import_external
from verl.workers.engine.base import EngineRegistry


@dataclass(frozen=True)
class SFTPreparation:
    """The tokenizer and the rows of a fine-tuning run."""

    tokenizer: PreTrainedTokenizerBase
    train: Conversations
    held_out: Conversations | None


def check_sft(config: SFTConfig, found: Findings) -> PreTrainedTokenizerBase | None:
    """The tokenizer, and what `found`, from `early_findings`, says about everything but the rows."""
    settings, strategy = config.trainer, config.engine.strategy
    if find_device(settings.device, found) is not None:
        found.run("ranks", lambda: num_ranks_to_start(config) or 1)
    if found.check("external_lib", lambda: import_external(config.model.external_lib)):
        found.run(
            "engine",
            lambda: EngineRegistry.get_engine_cls(objective_of(config).model_type, strategy),
            lambda e: e.__name__,
        )
    length = config.data.max_length
    tokenizer = find_tokenizer("model.path", config.model, length, "data.max_length", found)
    trained = [TrainedModel(config.model, config.training_engine, config.checkpoint)]
    warn_of_narrow_parameters(trained, found)
    check_disk_room(settings.default_local_dir, trained, settings.max_ckpt_to_keep, found)
    return tokenizer


def prepare_sft(config: SFTConfig, found: Findings) -> SFTPreparation | None:
    """The preparation of a run; None where `found` holds a refusal."""
    tokenizer, data = check_sft(config, found), config.data
    if tokenizer is None or found.errors:
        return None

    objective = objective_of(config)

    def read(files: str | list[str], count: int) -> Conversations:
        return objective.read(files, tokenizer, count)

    def size(rows: Conversations) -> str:
        return f"{len(rows)} {objective.row_name}"

    train = found.run("training rows", lambda: read(data.train_files, data.train_max_samples), size)
    held_out = None
    is_said = train is None and data.val_files == data.train_files
    if (val_files := data.val_files) and not is_said:
        held_out = found.run("validation rows", lambda: read(val_files, data.val_max_samples), size)
    return None if train is None or found.errors else SFTPreparation(tokenizer, train, held_out)
