#!/usr/bin/env bash
# DPPO: a trust region of the divergence of the sampled token, not of its ratio: clip_ratio_* bound a total variation,
# or nats with DIVERGENCE=kl. Source: arXiv 2602.04879.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/dppo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
DIVERGENCE=${DIVERGENCE:-tv} # tv or kl
if [[ $DIVERGENCE == kl ]]; then MAX_DIVERGENCE=${MAX_DIVERGENCE:-0.05}; else MAX_DIVERGENCE=${MAX_DIVERGENCE:-0.15}; fi
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode="dppo_$DIVERGENCE" \
  actor_rollout_ref.actor.clip_ratio_low="$MAX_DIVERGENCE" \
  actor_rollout_ref.actor.clip_ratio_high="$MAX_DIVERGENCE" \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
