#!/usr/bin/env bash
# GSPO: one ratio per sequence, so clip ranges are small; four mini-batches a step. Source: arXiv 2507.18071, section 5.1.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/gspo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  actor_rollout_ref.actor.clip_ratio_low=3e-4 \
  actor_rollout_ref.actor.clip_ratio_high=4e-4 \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
