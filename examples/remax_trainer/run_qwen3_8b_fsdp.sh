#!/usr/bin/env bash
# ReMax: the baseline is the score of a greedy answer; one sampled answer a prompt is enough. Source: arXiv 2310.10505.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/remax_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
ROLLOUT_N=${ROLLOUT_N:-1}
KL_COEF=${KL_COEF:-0.001}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=remax \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.kl_coef="$KL_COEF" \
  actor_rollout_ref.actor.ppo_mini_batch_size="$TRAIN_BATCH_SIZE" \
  "$@"
