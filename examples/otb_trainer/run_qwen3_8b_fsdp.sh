#!/usr/bin/env bash
# Optimal token baseline: a baseline of least variance for every token, from the squared norms of the gradients before
# it; TURNS=many counts sampled tokens alone, for answers with tool results. Source: arXiv 2602.07078.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/otb_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
ESTIMATOR=optimal_token_baseline
if [[ ${TURNS:-one} == many ]]; then ESTIMATOR=tir_$ESTIMATOR; fi
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator="$ESTIMATOR" \
  actor_rollout_ref.actor.calculate_sum_pi_squared=True \
  actor_rollout_ref.actor.ppo_mini_batch_size="$TRAIN_BATCH_SIZE" \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
