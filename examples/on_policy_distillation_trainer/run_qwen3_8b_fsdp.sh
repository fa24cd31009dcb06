#!/usr/bin/env bash
# On-policy distillation: the student samples, and the teacher's log-probs are the signal (docs/train/distillation.md).
# Source: arXiv 2306.13649.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
ROLLOUT_N=${ROLLOUT_N:-1}
DISTILLATION_LOSS_MODE=${DISTILLATION_LOSS_MODE:-k3} # or k2, forward_kl_topk, k1 with USE_POLICY_GRADIENT=True
DISTILLATION_TOPK=${DISTILLATION_TOPK:-32}
USE_POLICY_GRADIENT=${USE_POLICY_GRADIENT:-False}
TEACHER_MODEL_PATH=${TEACHER_MODEL_PATH:-$HOME/models/Qwen/Qwen3-32B}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  distillation.enabled=True \
  distillation.teacher_models.teacher_model.model_path="$TEACHER_MODEL_PATH" \
  distillation.distillation_loss.loss_mode="$DISTILLATION_LOSS_MODE" \
  distillation.distillation_loss.topk="$DISTILLATION_TOPK" \
  distillation.distillation_loss.use_policy_gradient="$USE_POLICY_GRADIENT" \
  distillation.distillation_loss.use_task_rewards=False \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
