#!/usr/bin/env bash
# GRPO for long prompts: training computes the prompt of a group once (docs/scale/prefix_sharing.md).
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/prefix_grouper/run_qwen3_8b_fsdp.sh [key=value ...]
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-8192}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.use_prefix_grouper=True \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  "$@"
