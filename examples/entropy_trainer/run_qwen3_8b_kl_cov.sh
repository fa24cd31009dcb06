#!/usr/bin/env bash
# KL-Cov: the tokens of the highest covariance of advantage and log-prob are held to the old policy by a KL penalty.
# Source: arXiv 2505.22617, section 4 (share of tokens 0.002 for a 7B model, coefficient 1).
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/entropy_trainer/run_qwen3_8b_kl_cov.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov \
  actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.002 \
  actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1.0 \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
