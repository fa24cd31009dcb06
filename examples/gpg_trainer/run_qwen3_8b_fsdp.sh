#!/usr/bin/env bash
# GPG: the plain policy gradient, scaled up by the share of answers without reward; one update a step, no KL.
# Source: arXiv 2504.02546.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/gpg_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=gpg \
  actor_rollout_ref.actor.policy_loss.loss_mode=gpg \
  actor_rollout_ref.actor.ppo_mini_batch_size="$TRAIN_BATCH_SIZE" \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
