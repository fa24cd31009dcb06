#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-8B, FSDP2 training. Source: arXiv 2402.03300.
#
#   python3 examples/data_preprocess/gsm8k.py
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/grpo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
KL_LOSS_COEF=${KL_LOSS_COEF:-0.001}
ROLLOUT_N=${ROLLOUT_N:-5}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef="$KL_LOSS_COEF" \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  "$@"
