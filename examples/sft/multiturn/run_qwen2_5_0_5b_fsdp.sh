#!/usr/bin/env bash
# Fine-tune on conversations of many turns: every assistant turn is trained, user turns are not.
#
#   python3 examples/data_preprocess/gsm8k_multiturn_sft.py --steps --local_dataset_path DIR --local_save_dir ~/data/gsm8k_steps
#   MODEL_PATH=~/models/Qwen/Qwen2.5-0.5B-Instruct bash examples/sft/multiturn/run_qwen2_5_0_5b_fsdp.sh [key=value ...]
#
# On several machines, start it on each of them with
#   LAUNCH="torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
set -euo pipefail

LAUNCH=${LAUNCH:-python3} # python3 starts one rank per device
MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen2.5-0.5B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k_steps}
SP_SIZE=${SP_SIZE:-1}

read -ra launch <<<"$LAUNCH"
"${launch[@]}" -m verl.trainer.sft_trainer \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.messages_key=messages \
  data.train_batch_size=64 \
  data.max_length=2048 \
  data.max_token_len_per_gpu=8192 \
  model.path="$MODEL_PATH" \
  engine.strategy=fsdp2 \
  engine.ulysses_sequence_parallel_size="$SP_SIZE" \
  optim.lr=1e-5 \
  optim.lr_warmup_steps_ratio=0.05 \
  trainer.total_epochs=1 \
  trainer.test_freq=50 \
  trainer.project_name=multiturn-sft \
  trainer.experiment_name=qwen2_5_0_5b \
  "$@"
