#!/usr/bin/env bash
# OPO: exactly on policy (one update a step) with the length-weighted baseline of least variance; neither KL nor entropy
# terms. Source: arXiv 2505.23585.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/opo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=opo \
  actor_rollout_ref.actor.ppo_mini_batch_size="$TRAIN_BATCH_SIZE" \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
