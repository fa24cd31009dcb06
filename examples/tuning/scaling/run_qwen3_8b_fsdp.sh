#!/usr/bin/env bash
# GRPO with long answers: sequences split over SP_SIZE ranks, micro-batches by tokens, sharing evened out between ranks
# (docs/scale/long_sequences.md, docs/scale/tuning.md).
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/tuning/scaling/run_qwen3_8b_fsdp.sh [key=value ...]
SP_SIZE=${SP_SIZE:-4}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-32768}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-256}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-64}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.entropy_from_logits_with_chunking=True \
  trainer.balance_batch=True \
  "$@"
