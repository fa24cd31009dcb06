"""The traces of a run's conversations, from its configuration."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from verl.config import RunConfig
from verl.observe.tracing.backends import TRACE_BACKENDS
from verl.observe.tracing.recorder import TraceRecorder
from verl.observe.tracing.writer import TraceWriter
from verl.observe.trackers import RunInfo


def record_traces(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], object]
) -> TraceRecorder | None:
    """The recorder of `rollout.trace.backend`; None without one. `note` gets the warnings."""
    settings, trainer = config.actor_rollout_ref.rollout.trace, config.trainer
    if settings.backend is None:
        return None
    project = settings.project_name or trainer.project_name
    run = RunInfo(project, settings.experiment_name or trainer.experiment_name)
    writer = TraceWriter(settings.backend, TRACE_BACKENDS[settings.backend], run, note)
    decode = lambda ids: str(tokenizer.decode(ids))  # noqa: E731
    return TraceRecorder(writer, decode, settings.token2text, settings.max_samples_per_step_per_worker)
