"""Checks of a distillation before it starts: teachers, their tokenizers, and whose rows are whose."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase

from verl.algorithms.distillation import DISTILLATION_LOSSES
from verl.checks.findings import Findings
from verl.checks.loaded import check_weights_are_there
from verl.config import RunConfig
from verl.config.distillation import Teacher, teachers
from verl.data.prompts import PromptDataset
from verl.models.load import load_tokenizer
from verl.utils.errors import ConfigError, DataError
from verl.utils.suggest import did_you_mean
from verl.workers.teacher import check_same_vocabulary, check_topk, teacher_model


def check_teachers(config: RunConfig, tokenizer: PreTrainedTokenizerBase, found: Findings) -> None:
    """Folder, tokenizer and vocabulary of every teacher."""
    use_topk = DISTILLATION_LOSSES.get(config.distillation.distillation_loss.loss_mode).use_topk
    for teacher in teachers(config.distillation):
        model = teacher_model(config, teacher)

        def look(teacher=teacher, model=model) -> str:
            with naming(teacher):
                check_weights_are_there(model)
                vocabulary = load_tokenizer(model).get_vocab()  # to be compared with the policy's
            check_same_vocabulary(tokenizer.get_vocab(), vocabulary, teacher)
            if use_topk:
                check_topk(config, teacher)
            return teacher.path

        found.run(f"distillation.teacher_models.{teacher.name}", look)


@contextmanager
def naming(teacher: Teacher) -> Iterator[None]:
    """Says of which teacher a model folder is refused."""
    try:
        yield
    except ConfigError as error:
        key = f"distillation.teacher_models.{teacher.name}.model_path"
        raise ConfigError(f"{key}={teacher.path} cannot be a teacher: {error}") from error


def assign_teachers(config: RunConfig, prompts: PromptDataset) -> dict[int, str] | None:
    """The teacher of each row; None where there is one without a key. DataError for a row whose key is unknown."""
    name_of = {teacher.key: teacher.name for teacher in teachers(config.distillation)}
    if None in name_of:
        return None
    column, out, strange = config.distillation.teacher_key, {}, []
    for row, location, value in prompts.column(column):
        if str(value) in name_of:
            out[row] = name_of[str(value)]
        else:
            strange.append((location, value))
    if strange:
        location, value = strange[0]
        said = f"has no {column!r}" if value is None else f"{column}={value!r} is the key of no teacher"
        advice = f"; {did_you_mean(str(value), map(str, name_of))}"
        total = len(out) + len(strange)
        raise DataError(
            f"{len(strange)} of {total} rows have no teacher, the first is {location}: {said}{advice} "
            f"(distillation.teacher_key={column}, distillation.teacher_models.*.key)"
        )
    return out
