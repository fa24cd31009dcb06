#!/usr/bin/env bash
# GRPO of low-rank adapters (arXiv 2106.09685) instead of the whole model: ten times the learning rate (docs/train/lora.md).
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/tuning/lora/run_qwen3_8b_fsdp.sh [key=value ...]
ACTOR_LR=${ACTOR_LR:-1e-5}
LORA_RANK=${LORA_RANK:-32}
LORA_ALPHA=${LORA_ALPHA:-32}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.model.lora_rank="$LORA_RANK" \
  actor_rollout_ref.model.lora_alpha="$LORA_ALPHA" \
  actor_rollout_ref.model.target_modules=all-linear \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  "$@"
