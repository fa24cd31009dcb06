#!/usr/bin/env bash
# REINFORCE++: no critic and no groups; the KL penalty (k1) is in the rewards of tokens, advantages are normalised over
# the batch. Source: arXiv 2501.03262, section 3.1.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/reinforce_plus_plus_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
ROLLOUT_N=${ROLLOUT_N:-1}
KL_COEF=${KL_COEF:-0.001}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=reinforce_plus_plus \
  algorithm.gamma=1.0 \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.kl_coef="$KL_COEF" \
  "$@"
