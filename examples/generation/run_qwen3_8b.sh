#!/usr/bin/env bash
# Answers of Qwen3-8B to every prompt of a file, then their scores; an interrupted run goes on where it stopped.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/generation/run_qwen3_8b.sh [key=value ...]
set -euo pipefail

INFER_BACKEND=${INFER_BACKEND:-native} # native, vllm or sglang
MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen3-8B}
TEST_FILE=${TEST_FILE:-$HOME/data/gsm8k/test.parquet}
OUTPUT_FILE=${OUTPUT_FILE:-$HOME/data/gsm8k/answers.parquet}
ROLLOUT_N=${ROLLOUT_N:-1}

python3 -m verl.trainer.main_generation_server \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.rollout.name="$INFER_BACKEND" \
  actor_rollout_ref.rollout.n="$ROLLOUT_N" \
  actor_rollout_ref.rollout.temperature="${TEMPERATURE:-0.7}" \
  actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP:-1}" \
  actor_rollout_ref.rollout.gpu_memory_utilization="${ROLLOUT_GPU_MEM_UTIL:-0.8}" \
  data.train_files="$TEST_FILE" \
  data.max_prompt_length="${MAX_PROMPT_LENGTH:-512}" \
  data.max_response_length="${MAX_RESPONSE_LENGTH:-1024}" \
  data.output_path="$OUTPUT_FILE" \
  "$@"

python3 -m verl.trainer.main_eval data.path="$OUTPUT_FILE"
