#!/usr/bin/env bash
# GDPO: the parts of the reward (REWARD_KEYS, which the reward function returns) are normalised in the group one by one,
# then summed. Source: arXiv 2601.05242, section 3.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/gdpo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
REWARD_KEYS=${REWARD_KEYS:-accuracy,format}
REWARD_FILE=${REWARD_FILE:-$(dirname "$(realpath "${BASH_SOURCE[0]}")")/reward.py}
KL_LOSS_COEF=${KL_LOSS_COEF:-0.001}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=gdpo \
  algorithm.gdpo_reward_keys="[$REWARD_KEYS]" \
  reward.custom_reward_function.path="$REWARD_FILE" \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef="$KL_LOSS_COEF" \
  "$@"
