#!/usr/bin/env bash
# REINFORCE++ with the group's mean as baseline, and the KL (k2) as a loss of its own. Source: arXiv 2501.03262, section 3.2.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/reinforce_plus_plus_trainer/run_qwen3_8b_baseline.sh [key=value ...]
KL_LOSS_COEF=${KL_LOSS_COEF:-0.001}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=reinforce_plus_plus_baseline \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_type=k2 \
  actor_rollout_ref.actor.kl_loss_coef="$KL_LOSS_COEF" \
  "$@"
