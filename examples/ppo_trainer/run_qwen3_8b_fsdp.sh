#!/usr/bin/env bash
# PPO (arXiv 1707.06347) with a critic, on GSM8K and MATH with Qwen3-8B, FSDP2 training, batches by token budget.
#
#   python3 examples/data_preprocess/gsm8k.py
#
# Set MATH_TRAIN_FILE and MATH_TEST_FILE to add MATH.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/ppo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
GSM8K_TRAIN_FILE=${GSM8K_TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
GSM8K_TEST_FILE=${GSM8K_TEST_FILE:-$HOME/data/gsm8k/test.parquet}
TRAIN_FILE="[${TRAIN_FILE:-$GSM8K_TRAIN_FILE${MATH_TRAIN_FILE:+,$MATH_TRAIN_FILE}}]"
TEST_FILE="[${TEST_FILE:-$GSM8K_TEST_FILE${MATH_TEST_FILE:+,$MATH_TEST_FILE}}]"
NGPUS_PER_NODE=${NGPUS_PER_NODE:-${NDEVICES_PER_NODE:-null}}
NPUS_PER_NODE=${NPUS_PER_NODE:-${NDEVICES_PER_NODE:-null}}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
ROLLOUT_N=${ROLLOUT_N:-1}
PROJECT_NAME=${PROJECT_NAME:-verl_ppo_gsm8k_math}
CRITIC_LR=${CRITIC_LR:-1e-5}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"
CRITIC_MODEL_PATH=${CRITIC_MODEL_PATH:-$MODEL_PATH}

train \
  algorithm.adv_estimator=gae \
  actor_rollout_ref.actor.use_kl_loss=False \
  critic.strategy=fsdp2 \
  critic.model.path="$CRITIC_MODEL_PATH" \
  critic.model.use_remove_padding=True \
  critic.model.enable_gradient_checkpointing=True \
  critic.optim.lr="$CRITIC_LR" \
  critic.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE" \
  critic.use_dynamic_bsz=True \
  critic.ppo_max_token_len_per_gpu="$((PPO_MAX_TOKEN_LEN_PER_GPU * 2))" \
  critic.forward_max_token_len_per_gpu="$((PPO_MAX_TOKEN_LEN_PER_GPU * 2))" \
  critic.fsdp.model_dtype="$MODEL_DTYPE" \
  critic.fsdp.param_offload="$OFFLOAD" \
  critic.fsdp.optimizer_offload="$OFFLOAD" \
  critic.fsdp.ulysses_sequence_parallel_size="$SP_SIZE" \
  trainer.critic_warmup=0 \
  "$@"
