#!/usr/bin/env bash
# Clip-Cov: a few random tokens whose covariance of advantage and log-prob is high get no gradient, so that the entropy
# stays up; in the place of the clip of the ratio, which is wide here. Source: arXiv 2505.22617, section 4.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/entropy_trainer/run_qwen3_8b_clip_cov.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov \
  actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.0002 \
  actor_rollout_ref.actor.policy_loss.clip_cov_lb=1.0 \
  actor_rollout_ref.actor.policy_loss.clip_cov_ub=5.0 \
  actor_rollout_ref.actor.clip_ratio=1.0 \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
