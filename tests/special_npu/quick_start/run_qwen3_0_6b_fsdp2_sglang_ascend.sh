#!/usr/bin/env bash
# Ascend quick start: GRPO on GSM8K with Qwen3-0.6B, FSDP2 training, SGLang rollout.
#
#   source /usr/local/Ascend/ascend-toolkit/set_env.sh
#   source /usr/local/Ascend/nnal/atb/set_env.sh
#   python3 examples/data_preprocess/gsm8k.py --local_dataset_path /path/to/gsm8k/
#   bash tests/special_npu/quick_start/run_qwen3_0_6b_fsdp2_sglang_ascend.sh [key=value ...]
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen3-0.6B}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
TEST_FILE=${TEST_FILE:-$HOME/data/gsm8k/test.parquet}
NPUS_PER_NODE=${NPUS_PER_NODE:-8}

export HCCL_CONNECT_TIMEOUT=1500
export HCCL_HOST_SOCKET_PORT_RANGE=60000-60050
export HCCL_NPU_SOCKET_PORT_RANGE=61000-61050
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="$TRAIN_FILE" \
  data.val_files="$TEST_FILE" \
  data.train_batch_size=32 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.ref.strategy=fsdp2 \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend="ascend" \
  +actor_rollout_ref.rollout.engine_kwargs.sglang.chunked_prefill_size=-1 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node="$NPUS_PER_NODE" \
  trainer.total_training_steps=5 \
  trainer.save_freq=-1 \
  trainer.test_freq=5 \
  trainer.project_name=verl_npu_quick_start \
  trainer.experiment_name=qwen3_0_6b_fsdp2_sglang \
  "$@"
