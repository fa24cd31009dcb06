#!/usr/bin/env bash
# GMPO: the geometric mean of the ratios of a sequence, each clipped to e^-0.4 ... e^0.4. Source: arXiv 2507.20673.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/gmpo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  actor_rollout_ref.actor.clip_ratio_low=0.4 \
  actor_rollout_ref.actor.clip_ratio_high=0.4 \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
