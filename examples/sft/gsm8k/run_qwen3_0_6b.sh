#!/usr/bin/env bash
# Fine-tune on the worked answers of GSM8K; with LORA_RANK=32 only a low-rank adapter is trained.
#
#   python3 examples/data_preprocess/gsm8k_multiturn_sft.py --local_dataset_path DIR
#   MODEL_PATH=~/models/Qwen/Qwen3-0.6B bash examples/sft/gsm8k/run_qwen3_0_6b.sh [key=value ...]
#
# Every variable below can be set in front of the command; further arguments are overrides and take precedence.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen3-0.6B}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k_sft}
DEVICES=${DEVICES:-null} # ranks on this machine; null: one per device, 1 on a CPU
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
MAX_LENGTH=${MAX_LENGTH:-1024}
MAX_TOKEN_LEN_PER_GPU=${MAX_TOKEN_LEN_PER_GPU:-8192}
LR=${LR:-1e-5}
LORA_RANK=${LORA_RANK:-0}
SP_SIZE=${SP_SIZE:-1}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-2}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3_0_6b}

python3 -m verl.trainer.sft_trainer \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.train_batch_size="$TRAIN_BATCH_SIZE" \
  data.max_length="$MAX_LENGTH" \
  data.truncation=right \
  data.use_dynamic_bsz=True \
  data.max_token_len_per_gpu="$MAX_TOKEN_LEN_PER_GPU" \
  model.path="$MODEL_PATH" \
  model.lora_rank="$LORA_RANK" \
  engine.ulysses_sequence_parallel_size="$SP_SIZE" \
  optim.lr="$LR" \
  optim.lr_warmup_steps_ratio=0.05 \
  optim.lr_scheduler_type=cosine \
  trainer.n_gpus_per_node="$DEVICES" \
  trainer.total_epochs="$TOTAL_EPOCHS" \
  trainer.test_freq=after_each_epoch \
  trainer.save_freq=after_each_epoch \
  trainer.project_name=gsm8k-sft \
  trainer.experiment_name="$EXPERIMENT_NAME" \
  "$@"
