"""Model FLOPs utilisation: the operations that a stage needs, as a share of what its devices can do in its time."""

from collections.abc import Mapping

from verl.data.batch import Batch
from verl.models.flops import Speed
from verl.runtime.group import WorkerGroup
from verl.trainer.ppo.trainer import PPOTrainer


def mfu_metrics(trainer: PPOTrainer, batch: Batch, seconds: Mapping[str, float]) -> dict[str, float]:
    """perf/mfu/{actor,actor_infer,critic} of the stages that ran; nothing for an engine that does not count.

    Each sequence is counted at its own length, as if no prompt were shared, and each epoch of the update once.
    """
    lengths, rows = batch.lengths.tolist(), int(batch["loss_mask"].sum())
    needed: dict[str, tuple[str, Speed, float]] = {}
    actor = speed_of(trainer.actor.group)
    if actor is not None:
        epochs = trainer.actor.mini_batches.epochs
        needed["update_actor"] = "actor", actor, actor.counts.update(lengths, rows) * epochs
        needed["old_log_prob"] = "actor_infer", actor, actor.counts.forward(lengths, rows)
    critic = speed_of(trainer.critic.group) if trainer.critic is not None else None
    if critic is not None and trainer.critic is not None:
        epochs = trainer.critic.mini_batches.epochs
        needed["update_critic"] = "critic", critic, critic.counts.update(lengths, rows) * epochs
    return {
        f"perf/mfu/{name}": speed.mfu(flops, seconds[stage])
        for stage, (name, speed, flops) in needed.items()
        if stage in seconds
    }


def speed_of(group: WorkerGroup) -> Speed | None:
    """What the model of a group costs, and what all its ranks together can do."""
    speeds: list[Speed | None] = group.broadcast("speed")
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds):
        return None
    return Speed(known[0].counts, sum(speed.peak_flops for speed in known))
