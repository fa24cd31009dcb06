#!/usr/bin/env bash
# A reward model from pairs made from GSM8K; with LORA_RANK=32 only a low-rank adapter is trained.
#
#   python3 examples/data_preprocess/gsm8k_preferences.py --local_dataset_path DIR
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/reward_model/run_qwen3_8b_fsdp.sh [key=value ...]
#
# Every variable below can be set in front of the command; further arguments are overrides and take precedence.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen3-8B}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k_pairs}
DEVICES=${DEVICES:-null} # ranks on this machine; null: one per device, 1 on a CPU
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64} # pairs
MAX_LENGTH=${MAX_LENGTH:-1024}
MAX_TOKEN_LEN_PER_GPU=${MAX_TOKEN_LEN_PER_GPU:-8192}
LR=${LR:-1e-5}
LORA_RANK=${LORA_RANK:-0}
SP_SIZE=${SP_SIZE:-1}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-1}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3_8b}

python3 -m verl.trainer.reward_trainer \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.train_batch_size="$TRAIN_BATCH_SIZE" \
  data.max_length="$MAX_LENGTH" \
  data.truncation=right \
  data.max_token_len_per_gpu="$MAX_TOKEN_LEN_PER_GPU" \
  model.path="$MODEL_PATH" \
  model.lora_rank="$LORA_RANK" \
  engine.ulysses_sequence_parallel_size="$SP_SIZE" \
  optim.lr="$LR" \
  optim.lr_warmup_steps_ratio=0.1 \
  optim.lr_scheduler_type=cosine \
  trainer.n_gpus_per_node="$DEVICES" \
  trainer.total_epochs="$TOTAL_EPOCHS" \
  trainer.test_freq=20 \
  trainer.save_freq=after_each_epoch \
  trainer.project_name=gsm8k-reward-model \
  trainer.experiment_name="$EXPERIMENT_NAME" \
  "$@"
