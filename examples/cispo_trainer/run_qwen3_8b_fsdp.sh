#!/usr/bin/env bash
# CISPO: the clipped ratio weighs the gradient of every token and has none itself; no lower bound.
# Source: arXiv 2506.13585, section 3.1, which leaves the upper bound to tuning.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/cispo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
CLIP_RATIO_HIGH=${CLIP_RATIO_HIGH:-0.2}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=cispo \
  actor_rollout_ref.actor.clip_ratio_low=10.0 \
  actor_rollout_ref.actor.clip_ratio_high="$CLIP_RATIO_HIGH" \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
