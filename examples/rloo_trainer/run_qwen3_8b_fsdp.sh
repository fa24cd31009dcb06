#!/usr/bin/env bash
# RLOO: the baseline of an answer is the mean of the other answers; the KL penalty is in the reward, one update a step.
# Source: arXiv 2402.14740, section 3 (4 answers, KL coefficient 0.03).
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/rloo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
ROLLOUT_N=${ROLLOUT_N:-4}
KL_COEF=${KL_COEF:-0.03}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=rloo \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.kl_coef="$KL_COEF" \
  actor_rollout_ref.actor.ppo_mini_batch_size="$TRAIN_BATCH_SIZE" \
  "$@"
