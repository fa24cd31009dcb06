"""Teachers of on-policy distillation: frozen models on the actor's ranks, with the engine settings of the reference."""

import dataclasses
from collections.abc import Mapping

from verl.algorithms.distillation import DISTILLATION_LOSSES
from verl.config import HFModelConfig, RunConfig
from verl.config.actor import LOG_PROB_BATCHING_KEYS
from verl.config.distillation import Teacher, role_name, teachers
from verl.data.balance import Shard
from verl.data.batch import Batch
from verl.models.head.chosen_tokens import TopLogits
from verl.models.load import build_config
from verl.runtime.pools import WorkerPools
from verl.utils.errors import ConfigError, DataError
from verl.workers.batch_dispatch import OnSequences, ShardDispatcher, gather_columns, ignore
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_worker import EngineWorker, micro_batching

Forward = tuple[ShardDispatcher, float]  # a teacher's ranks, and its temperature


class Teachers:
    """The teachers' columns of a batch. `teacher_of_row` names each row's teacher; without, all have the only one."""

    def __init__(
        self,
        config: RunConfig,
        pools: WorkerPools,
        teacher_of_row: Mapping[int, str] | None,
        on_sequences: OnSequences = ignore,
    ):
        arr, self.teacher_of_row = config.actor_rollout_ref, teacher_of_row
        sampling = arr.rollout.temperature if arr.rollout.do_sample else 1.0
        self.forwards: dict[str, Forward] = {}
        for teacher in teachers(config.distillation):
            group = pools.for_role(role_name(teacher.name))
            shared, balanced = arr.actor.use_prefix_grouper, config.trainer.balance_batch
            dispatcher = ShardDispatcher(group, balanced, shared, on_sequences=on_sequences)
            self.forwards[teacher.name] = (dispatcher, teacher.temperature or sampling)
        self.micro = micro_batching(arr.ref, LOG_PROB_BATCHING_KEYS, arr.ref.engine.ranks_per_sequence)
        self.use_topk = DISTILLATION_LOSSES.get(config.distillation.distillation_loss.loss_mode).use_topk

    def annotate(self, batch: Batch) -> Batch:
        """Adds teacher_top_ids and teacher_top_logprobs, or teacher_logprobs, as the distillation loss asks."""
        names = ("top_ids", "top_logprobs") if self.use_topk else ("logprobs",)
        shards, parts = [], []
        for name, indices in self.indices_by_teacher(batch).items():
            dispatcher, temperature = self.forwards[name]
            inputs = batch.select_columns(()).select(indices)
            parts.append(dispatcher.forward(inputs, names, self.micro, temperature))
            shards.append(Shard(tuple(indices), self.micro))
        columns = gather_columns(batch, shards, parts)
        if not self.use_topk:
            return batch.with_columns(teacher_logprobs=columns["logprobs"])
        return batch.with_columns(teacher_top_ids=columns["top_ids"], teacher_top_logprobs=columns["top_logprobs"])

    def indices_by_teacher(self, batch: Batch) -> dict[str, list[int]]:
        """The sequence indices of each teacher that has any; DataError for one whose row has none."""
        if self.teacher_of_row is None:
            return {next(iter(self.forwards)): list(range(batch.num_sequences))}
        out: dict[str, list[int]] = {}
        for index, row in enumerate(batch["rows"].tolist()):
            if row not in self.teacher_of_row:
                raise DataError(f"a sequence of row {row} has no teacher: the row is not one of the training data")
            out.setdefault(self.teacher_of_row[row], []).append(index)
        return out


def teacher_model(config: RunConfig, teacher: Teacher) -> HFModelConfig:
    """The student's settings of a model, with the teacher's folder and without adapters."""
    student = config.actor_rollout_ref.model
    kept = {name: value for name, value in student.override_config.items() if name == "attn_implementation"}
    own = {"path": teacher.path, "override_config": kept, "lora_rank": 0, "lora_adapter_path": None}
    return dataclasses.replace(student, **own, hf_config_path=None, tokenizer_path=None)


def vocabulary_size(model: HFModelConfig) -> int:
    """How many ids the head of a model has; more than its tokenizer, if it is padded."""
    return int(build_config(model)[0].get_text_config().vocab_size)


def check_topk(config: RunConfig, teacher: Teacher) -> None:
    """ConfigError where the teacher or the policy has fewer tokens than `topk`."""
    models = (config.actor_rollout_ref.model, teacher_model(config, teacher))
    topk, smallest = config.distillation.distillation_loss.topk, min(map(vocabulary_size, models))
    if topk > smallest:
        raise ConfigError(
            f"distillation.distillation_loss.topk={topk} is more than the {smallest} tokens of the vocabulary; lower it"
        )


def build_teacher_worker(config: RunConfig, name: str) -> EngineWorker:
    """A forward-only worker on a teacher's weights; its most likely tokens are ids that the policy has, too."""
    ref = config.actor_rollout_ref.ref
    [teacher] = [found for found in teachers(config.distillation) if found.name == name]
    engine = EngineRegistry.new("language_model", ref.strategy, teacher_model(config, teacher), ref.engine)
    student_ids = vocabulary_size(config.actor_rollout_ref.model)
    engine.top = TopLogits(config.distillation.distillation_loss.topk, student_ids)
    return EngineWorker(engine)


def check_same_vocabulary(student: dict[str, int], other: dict[str, int], teacher: Teacher) -> None:
    """ConfigError unless the two tokenizers give every token the same id."""
    different = sorted(
        (token for token in student.keys() | other.keys() if student.get(token) != other.get(token)),
        key=lambda token: (min(student.get(token, 1 << 60), other.get(token, 1 << 60)), token),
    )
    if different:
        token = different[0]
        raise ConfigError(
            f"distillation.teacher_models.{teacher.name}.model_path={teacher.path} has another tokenizer than the "
            f"policy: {len(different)} tokens differ, first {token!r}, id {other.get(token)} and not "
            f"{student.get(token)}. Its log-probs would be about other tokens; choose a teacher of the policy's family"
        )
