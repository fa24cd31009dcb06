#!/usr/bin/env bash
# GRPO with weights and rejection for the gap between the rollout's log-probs and the trainer's: the values of the preset
# decoupled_geo_rs_token_tis. `verl config explain algorithm.rollout_correction` lists the presets.
# Sources: truncated weights as in arXiv 1312.6203; rejection by the mean log-ratio of a sequence.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/rollout_correction/run_qwen3_8b_fsdp.sh [key=value ...]
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=2.0 \
  algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
  algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
