#!/usr/bin/env bash
# GRPO on all of GSM8K with SmolLM2-135M-Instruct on one GPU, after fine-tuning on the worked answers
# (docs/start/examples/pretrained/README.md). Not run on a GPU yet.
#
#   MODEL_PATH=~/models/smollm2-gsm8k bash examples/pretrained/run_smollm2_gsm8k.sh [key=value ...]
#
# Every variable below can be set in front of the command; further arguments are overrides and take precedence.
set -euo pipefail

INFER_BACKEND=${INFER_BACKEND:-native} # native or vllm
MODEL_PATH=${MODEL_PATH:-$HOME/models/smollm2-gsm8k}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
ROLLOUT_N=${ROLLOUT_N:-8}
LR=${LR:-2e-6}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-3}

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.train_batch_size="$TRAIN_BATCH_SIZE" \
  data.max_prompt_length=384 \
  data.max_response_length=320 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.rollout.name="$INFER_BACKEND" \
  actor_rollout_ref.rollout.n="$ROLLOUT_N" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((TRAIN_BATCH_SIZE / 2)) \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
  actor_rollout_ref.actor.optim.lr="$LR" \
  trainer.n_gpus_per_node=1 \
  trainer.total_epochs="$TOTAL_EPOCHS" \
  trainer.test_freq=20 \
  trainer.project_name=pretrained \
  trainer.experiment_name=smollm2_gsm8k \
  "$@"
