#!/usr/bin/env bash
# On-policy distillation: the student samples, and the teacher's log-probs of its tokens are the signal (reverse KL).
# Source: arXiv 2306.13649.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
ROLLOUT_N=${ROLLOUT_N:-1}
TEACHER_MODEL_PATH=${TEACHER_MODEL_PATH:-$HOME/models/Qwen/Qwen3-32B}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  distillation.enabled=True \
  distillation.teacher_models.teacher_model.model_path="$TEACHER_MODEL_PATH" \
  distillation.distillation_loss.loss_mode=k3 \
  distillation.distillation_loss.use_task_rewards=False \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
