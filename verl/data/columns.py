"""The columns of a batch: what each holds, which function writes it and which functions read it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of `Batch`. N sequences, T tokens in all; entry t of a token column is about token t.

    Log-probs are natural logarithms (nats) at the sampling temperature.
    """

    shape: str  # "(T,)", "(T, k)", "(N,)" or "(N, 2)"
    dtype: str  # as torch names it; float32 becomes float64 where a model computes in float64
    meaning: str
    written_by: tuple[str, ...]  # functions that add or replace the column; none where only a user's code does
    read_by: tuple[str, ...]  # the functions that depend on it most
    scope: str = "step"  # of which batch it is a column: the step's, a mini-batch, a micro-batch, preference pairs
    asked: bool = False  # True: only there when the advantage estimator or the policy loss asks for it
    masked: float | None = None  # value where loss_mask is False; None where such positions have values of their own


REWARD_PART = "reward_parts."  # and the name of a part of the reward: a column of its own

COLUMNS: dict[str, Column] = {
    "tokens": Column(
        "(T,)",
        "int64",
        "token ids of prompts, completions and tool results, in order",
        written_by=("Batch.pack",),
        read_by=("MicroBatch.of", "head_input", "prompt_groups", "Ledger.append"),
    ),
    "loss_mask": Column(
        "(T,)",
        "bool",
        "True on tokens that the policy sampled, less rejected_tokens from correct to update; in fine-tuning, on "
        "tokens that are trained",
        written_by=("Batch.pack", "correct", "PPOTrainer.update"),
        read_by=(
            "MicroBatch.of",
            "head_input",
            "last_sampled_positions",
            "gae",
            "on_sampled_tokens",
            "loss_weights",
            "trained_mask",
            "Ledger.append",
        ),
        masked=0,
    ),
    "rollout_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob of the token by the rollout engine when it sampled it, nats",
        written_by=("Batch.pack",),
        read_by=("Recorded.find", "correct", "mismatch_metrics", "Ledger.append"),
        masked=0,
    ),
    "old_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob by the policy before this step's update, nats; added after the update where its own forward pass "
        "gives the same numbers; a copy of rollout_logprobs with rollout_correction.bypass_mode, and in asynchronous "
        "training on answers of older weights, or by the trainer of the version that sampled the token",
        written_by=("PPOTrainer.pack", "OnePass.fill", "PPOTrainer.update"),
        read_by=("apply_kl_in_reward", "ActorLoss.__call__", "OnePass.mismatch", "Ledger.append"),
        masked=0,
    ),
    "entropy": Column(
        "(T,)",
        "float32",
        "entropy of the policy's distribution before this step's update, from which the token was sampled, nats",
        written_by=("OnePass.with_outputs", "PPOTrainer.update"),
        read_by=("entropy_metrics",),
        masked=0,
    ),
    "sum_pi_squared": Column(
        "(T,)",
        "float32",
        "sum over the vocabulary of the squared probabilities by the policy before this step's update, 0 to 1",
        written_by=("OnePass.with_outputs",),
        read_by=("_subtract_baselines", "AdvantageAdapter.arguments"),
        masked=0,
        asked=True,
    ),
    "rollout_is_weights": Column(
        "(T,)",
        "float32",
        "factor of the policy loss: probability by the trained policy / by the rollout, limited (rollout_correction)",
        written_by=("correct",),
        read_by=("ActorLoss.__call__", "_subtract_baselines", "variance_proxy_metrics", "AdvantageAdapter.arguments"),
        masked=0,
        asked=True,
    ),
    "rejected_tokens": Column(
        "(T,)",
        "bool",
        "True on sampled tokens that rollout correction has taken out of loss_mask",
        written_by=("correct",),
        read_by=("Batch.sampled_mask", "trained_mask"),
        masked=0,
        asked=True,
    ),
    "ref_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob by the frozen reference policy, nats",
        written_by=("PPOTrainer.evaluate", "SFTTrainer.prepared"),
        read_by=("apply_kl_in_reward", "ActorLoss.__call__", "DPOLoss.rewards", "Ledger.append"),
        masked=0,
    ),
    "teacher_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob by the teacher, nats, at the teacher's temperature",
        written_by=("Teachers.annotate",),
        read_by=("DistillationTerm.__call__",),
        masked=0,
        asked=True,
    ),
    "teacher_top_ids": Column(
        "(T, k)",
        "int64",
        "the teacher's k most likely tokens in place of the token, the most likely first",
        written_by=("Teachers.annotate",),
        read_by=("TorchEngine._outputs",),
        masked=0,
        asked=True,
    ),
    "teacher_top_logprobs": Column(
        "(T, k)",
        "float32",
        "log-probs of teacher_top_ids by the teacher, nats, at the teacher's temperature",
        written_by=("Teachers.annotate",),
        read_by=("DistillationTerm.__call__",),
        masked=0,
        asked=True,
    ),
    "values": Column(
        "(T,)",
        "float32",
        "the critic's estimate of the return before the token is sampled, in units of reward",
        written_by=("PPOTrainer.evaluate", "ReturnScale.update_and_normalize"),
        read_by=("gae", "ValueLoss.__call__", "data_metrics", "Ledger.append"),
        masked=0,
    ),
    "token_rewards": Column(
        "(T,)",
        "float32",
        "reward of the sequence on its last sampled token (on its last token if none was sampled), "
        "minus the KL penalty per token with use_kl_in_reward",
        written_by=("with_token_rewards", "apply_kl_in_reward"),
        read_by=("gae", "sequence_scores", "data_metrics"),
        masked=0,
    ),
    "advantages": Column(
        "(T,)",
        "float32",
        "how much better than expected the token was, by algorithm.adv_estimator",
        written_by=("compute_advantages",),
        read_by=("ActorLoss.__call__", "data_metrics", "Ledger.append"),
        masked=0,
    ),
    "returns": Column(
        "(T,)",
        "float32",
        "what the critic learns to predict, in units of reward",
        written_by=("compute_advantages", "ReturnScale.update_and_normalize"),
        read_by=("ValueLoss.__call__", "data_metrics"),
        masked=0,
    ),
    "loss_weights": Column(
        "(T,)",
        "float32",
        "factor of the token's loss by loss_agg_mode, over one mini-batch: the loss is the sum of weight x loss",
        scope="mini-batch",
        written_by=("with_loss_weights",),
        read_by=("ActorLoss.__call__", "ValueLoss.__call__", "LikelihoodLoss.__call__", "TokenMetricSums.add"),
        masked=0,
    ),
    "current_logprobs": Column(
        "(T,)",
        "float32",
        "log-prob by the policy at the beginning of the mini-batch, nats; for a loss that chooses tokens",
        scope="mini-batch",
        written_by=("Actor.with_chosen_tokens",),
        read_by=("token_covariances", "choose_for_clip_cov"),
        masked=0,
        asked=True,
    ),
    "chosen_tokens": Column(
        "(T,)",
        "bool",
        "True on the tokens that the policy loss has chosen over the mini-batch",
        scope="mini-batch",
        written_by=("with_chosen_tokens",),
        read_by=("clip_cov", "kl_cov"),
        masked=0,
        asked=True,
    ),
    "token_indices": Column(
        "(T,)",
        "int64",
        "position of the token in the step's batch, kept through the cut into mini-batches",
        scope="mini-batch",
        written_by=("Actor.update",),
        read_by=("Actor.update",),
    ),
    "_token_indices": Column(
        "(T,)",
        "int64",
        "position of the token in the shard that its micro-batch was cut from",
        scope="micro-batch",
        written_by=("micro_batches",),
        read_by=("write_outputs",),
    ),
    "rewards": Column(
        "(N,)",
        "float32",
        "score of the sequence by the reward function, NaN where it has none; of a chosen answer, the row's margin",
        written_by=("Batch.pack",),
        read_by=("with_token_rewards", "data_metrics", "trajectory_columns", "PairLoss.pair_losses"),
    ),
    "group_ids": Column(
        "(N,)",
        "int64",
        "the same number for all sequences that answer one prompt",
        written_by=("Batch.pack",),
        read_by=("group_numbers", "MiniBatches.split", "trajectory_columns", "sequence_groups", "pair_indices"),
    ),
    "conversations": Column(
        "(N,)",
        "int64",
        "number of the conversation in its group, the same for all outputs of one; -1: a conversation of its own",
        written_by=("Batch.pack",),
        read_by=("conversation_numbers", "trajectory_columns"),
    ),
    "slot_ids": Column(
        "(N,)",
        "int64",
        "group_ids of the batch before algorithm.use_pf_ppo drew its sequences again: which are cut into mini-batches "
        "together",
        written_by=("resample_by_score",),
        read_by=("MiniBatches.split",),
        asked=True,
    ),
    "preferred": Column(
        "(N,)",
        "bool",
        "True on the chosen answer of a preference pair, False on the rejected one",
        scope="preference pairs",
        written_by=("Pairs.prepare",),
        read_by=("pair_indices",),
    ),
    "rows": Column(
        "(N,)",
        "int64",
        "index of the prompt's row in the data set; -1 where there is none",
        written_by=("Batch.pack",),
        read_by=("trajectory_columns",),
    ),
    "policy_versions": Column(
        "(N, 2)",
        "int64",
        "version of the oldest and of the newest weights that sampled a token of the sequence",
        written_by=("Batch.pack",),
        read_by=("PPOTrainer.step_metrics", "FromUpdate.find", "off_policy_metrics", "trajectory_columns"),
    ),
    "reward_parts.NAME": Column(
        "(N,)",
        "float32",
        "the number that the reward function returned as NAME beside the score; `score` is the score itself",
        written_by=("with_reward_columns",),
        read_by=("reward_parts_of_gdpo",),
        asked=True,
    ),
    "reward_baselines": Column(
        "(N,)",
        "float32",
        "reward of a greedy answer to the same prompt",
        written_by=("with_reward_columns",),
        read_by=("remax", "AdvantageAdapter.arguments"),
        asked=True,
    ),
}


def writer_of(name: str) -> str:
    """Who fills column `name`, for messages."""
    key = REWARD_PART + "NAME" if name.startswith(REWARD_PART) else name
    if key not in COLUMNS:
        return "the stage that fills it"
    return " or ".join(COLUMNS[key].written_by) or "your own code"
