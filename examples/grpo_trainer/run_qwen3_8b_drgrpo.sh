#!/usr/bin/env bash
# Dr.GRPO: GRPO without the division by the group's deviation and by the answer's length, and without a KL term.
# Source: arXiv 2503.20783, section 3.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/grpo_trainer/run_qwen3_8b_drgrpo.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
  actor_rollout_ref.actor.loss_scale_factor="$MAX_RESPONSE_LENGTH" \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
