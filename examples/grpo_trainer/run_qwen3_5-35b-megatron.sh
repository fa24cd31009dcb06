#!/usr/bin/env bash
# GRPO with Qwen3.5-35B (mixture of experts), Megatron-LM training: tensor, pipeline and expert parallel.
#
#   MODEL_PATH=~/models/Qwen/Qwen3.5-35B-A3B bash examples/grpo_trainer/run_qwen3_5-35b-megatron.sh [key=value ...]
set -euo pipefail

INFER_BACKEND=${INFER_BACKEND:-vllm}
MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen3.5-35B-A3B}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
TEST_FILE=${TEST_FILE:-$HOME/data/gsm8k/test.parquet}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-64}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-2048}
ACTOR_TP=${ACTOR_TP:-2}
ACTOR_PP=${ACTOR_PP:-1}
ACTOR_EP=${ACTOR_EP:-8}
ROLLOUT_TP=${ROLLOUT_TP:-8}
ROLLOUT_N=${ROLLOUT_N:-5}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-15}

# Megatron overlaps tensor-parallel communication only when kernels are launched from one queue.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

python3 -m verl.trainer.main_ppo \
  --config-name=ppo_megatron_trainer \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="$TRAIN_FILE" \
  data.val_files="$TEST_FILE" \
  data.train_batch_size="$TRAIN_BATCH_SIZE" \
  data.max_prompt_length="$MAX_PROMPT_LENGTH" \
  data.max_response_length="$MAX_RESPONSE_LENGTH" \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE" \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((2 * (MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH)))" \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.01 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$ACTOR_TP" \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$ACTOR_PP" \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size="$ACTOR_EP" \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  actor_rollout_ref.actor.megatron.grad_offload=True \
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size="$ACTOR_TP" \
  actor_rollout_ref.ref.megatron.pipeline_model_parallel_size="$ACTOR_PP" \
  actor_rollout_ref.ref.megatron.expert_model_parallel_size="$ACTOR_EP" \
  actor_rollout_ref.ref.megatron.param_offload=True \
  actor_rollout_ref.rollout.name="$INFER_BACKEND" \
  actor_rollout_ref.rollout.n="$ROLLOUT_N" \
  actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  trainer.nnodes="$NNODES" \
  trainer.n_gpus_per_node="$NGPUS_PER_NODE" \
  trainer.total_epochs="$TOTAL_EPOCHS" \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.project_name=verl_grpo_megatron \
  trainer.experiment_name=qwen3_5_35b_megatron \
  "$@"
