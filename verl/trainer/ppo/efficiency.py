"""Cost of the stages: MFU (FLOPs needed over peak FLOPs of the devices), and memory, as planned and as measured."""

from collections.abc import Mapping, Sequence

from verl.data.batch import Batch
from verl.data.shared_prompts import repeated_prompt_lengths
from verl.models.flops import Speed
from verl.observe.memory_metrics import GIB
from verl.placement.memory import PoolMemory
from verl.placement.plan import Plan
from verl.trainer.ppo.trainer import PPOTrainer

STAGES = {  # phase of a plan -> where its metrics are, and the role whose devices they are of
    "collect": ("gen", "rollout"),
    "reward": ("reward_model", "reward_model"),
    "log-probs": ("old_log_prob", "actor"),
    "reference": ("ref", "reference"),
    "values": ("values", "critic"),
    "update critic": ("critic", "critic"),
    "update actor": ("actor", "actor"),
    "publish": ("update_weights", "actor"),
}


def mfu_metrics(trainer: PPOTrainer, batch: Batch, trained: Batch, seconds: Mapping[str, float]) -> dict[str, float]:
    """perf/mfu/{actor,actor_infer,critic} of the stages that ran; empty for an engine without FLOP counts.

    Each sequence is counted at its own length, without a prompt that the role shares with an earlier one
    (`actor.use_prefix_grouper`), and each epoch of the update, which is of `trained`, once.
    """
    lengths, num_sampled = trained.lengths.tolist(), int(trained["loss_mask"].sum())
    needed = dict[str, tuple[str, Speed, float]]()
    for name, role in {"actor": trainer.actor, "critic": trainer.critic}.items():
        speed = None if role is None else role.dispatcher.speed()
        if role is None or speed is None:
            continue
        shares = role.dispatcher.shares_prompts
        repeated = repeated_prompt_lengths(trained) if shares else []
        flops = speed.counts.update(lengths, num_sampled) - speed.counts.update(repeated, 0)
        needed[f"update_{name}"] = name, speed, flops * role.mini_batches.epochs
        if name == "actor":
            repeated = repeated_prompt_lengths(batch) if shares else []
            flops = speed.counts.forward(batch.lengths.tolist(), int(batch["loss_mask"].sum()))
            needed["old_log_prob"] = "actor_infer", speed, flops - speed.counts.forward(repeated, 0)
    return {
        f"perf/mfu/{name}": speed.mfu(flops, seconds[stage])
        for stage, (name, speed, flops) in needed.items()
        if stage in seconds
    }


def forward_memory_metrics(trainer: PPOTrainer, seconds: Mapping[str, float]) -> dict[str, float]:
    """<stage>/perf/*memory*_gb of the forward-only stages that ran, named as in timing_s; maximum over ranks."""
    stages = {"old_log_prob": trainer.actor, "ref": trainer.reference, "values": trainer.critic}
    out = {}
    for stage, role in stages.items():
        if role is not None and stage in seconds:
            out.update(role.dispatcher.forward_memory.with_prefix(f"{stage}/").values())
    return out


def planned_memory_metrics(plan: Plan, memory: Sequence[PoolMemory]) -> dict[str, float]:
    """<stage>/perf/planned_memory_gb: what the plan puts on a device in each phase. Nothing where no plan is known."""
    out = {}
    for pool, planned in zip(plan.pools, memory, strict=False):
        for phase, size in zip(planned.phases, planned.sums, strict=True) if planned.holdings else ():
            stage, role = STAGES.get(phase, ("", ""))
            if role in pool.roles:
                out[f"{stage}/perf/planned_memory_gb"] = size / GIB
    return out


def published_memory_metrics(trainer: PPOTrainer) -> dict[str, float]:
    """update_weights/perf/device_memory_used_gb after a publish, when the rollout is awake; maximum over ranks."""
    used = max(trainer.actor.group.broadcast("device_memory_used"))
    return {"update_weights/perf/device_memory_used_gb": used / GIB} if used else {}
