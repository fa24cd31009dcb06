#!/usr/bin/env bash
# The recipe of arXiv 2510.13786: CISPO with the ratio at most 5, every prompt of equal weight, advantages normalised
# over the batch, groups of equal scores left out; the head multiplies in float32, in the trainer as in vLLM and SGLang.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/scalerl_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-48}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-48}
ROLLOUT_N=${ROLLOUT_N:-16}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

if [[ $INFER_BACKEND == vllm ]]; then
  options+=(+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.head_dtype=float32)
elif [[ $INFER_BACKEND == sglang ]]; then
  options+=(+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_fp32_lm_head=True)
fi

train \
  algorithm.adv_estimator=reinforce_plus_plus_baseline \
  algorithm.filter_groups.enable=True \
  algorithm.filter_groups.metric=acc \
  actor_rollout_ref.actor.policy_loss.loss_mode=cispo \
  actor_rollout_ref.actor.clip_ratio_low=10.0 \
  actor_rollout_ref.actor.clip_ratio_high=4.0 \
  actor_rollout_ref.actor.loss_agg_mode=prompt-mean-token-mean \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.fsdp_config.head_dtype=float32 \
  "$@"
