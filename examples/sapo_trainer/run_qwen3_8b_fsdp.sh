#!/usr/bin/env bash
# SAPO: a soft gate in the place of the clip, narrower for negative advantages. Source: arXiv 2511.20347, section 5.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/sapo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=sapo \
  actor_rollout_ref.actor.tau_pos=1.0 \
  actor_rollout_ref.actor.tau_neg=1.05 \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
