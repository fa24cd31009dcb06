#!/usr/bin/env bash
# DAPO on competition mathematics, fully asynchronous: four GPUs train Qwen2.5-Math-7B, four others sample, and neither
# waits for the other. docs/train/asynchronous.md says what the keys mean; arXiv 2503.14476, section 4.1 has the algorithm.
#
#   bash verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_4_4.sh [key=value ...]
#
# The context of the published model is 4,096 tokens: set max_position_embeddings of its config.json to 32768 first.
set -euo pipefail

RAY_DATA_HOME=${RAY_DATA_HOME:-$HOME/verl}
MODEL_PATH=${MODEL_PATH:-$RAY_DATA_HOME/models/Qwen2.5-Math-7B}
CKPTS_DIR=${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/fully_async/dapo_7b_math_fsdp2_4_4}
TRAIN_FILE=${TRAIN_FILE:-$RAY_DATA_HOME/data/dapo-math-17k.parquet}
TEST_FILE=${TEST_FILE:-$RAY_DATA_HOME/data/aime-2024.parquet}

INFER_BACKEND=${INFER_BACKEND:-native}
NGPUS_TRAINING=${NGPUS_TRAINING:-4}
NGPUS_ROLLOUT=${NGPUS_ROLLOUT:-4}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-28672}
OVERLONG_BUFFER_LEN=${OVERLONG_BUFFER_LEN:-4096}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-32}
TRIGGER_PARAMETER_SYNC_STEP=${TRIGGER_PARAMETER_SYNC_STEP:-4}
STALENESS_THRESHOLD=${STALENESS_THRESHOLD:-0.1}
TOTAL_ROLLOUT_STEPS=${TOTAL_ROLLOUT_STEPS:-51200} # prompts in all

python3 -m verl.experimental.fully_async_policy.fully_async_main \
  --config-name=fully_async_ppo_trainer \
  data.train_files="$TRAIN_FILE" \
  data.val_files="$TEST_FILE" \
  data.prompt_key=prompt \
  data.truncation=left \
  data.max_prompt_length="$MAX_PROMPT_LENGTH" \
  data.max_response_length="$MAX_RESPONSE_LENGTH" \
  data.train_batch_size=0 \
  data.gen_batch_size=1 \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  actor_rollout_ref.hybrid_engine=False \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.clip_ratio_c=10.0 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE" \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH)) \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
  actor_rollout_ref.actor.optim.weight_decay=0.1 \
  actor_rollout_ref.actor.fsdp_config.param_offload=False \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
  actor_rollout_ref.rollout.name="$INFER_BACKEND" \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  reward.reward_manager.name=dapo \
  reward.reward_kwargs.overlong_buffer_cfg.enable=True \
  reward.reward_kwargs.overlong_buffer_cfg.len="$OVERLONG_BUFFER_LEN" \
  reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
  reward.reward_kwargs.max_resp_len="$MAX_RESPONSE_LENGTH" \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node="$NGPUS_TRAINING" \
  rollout.nnodes=1 \
  rollout.n_gpus_per_node="$NGPUS_ROLLOUT" \
  rollout.n="${ROLLOUT_N:-16}" \
  rollout.total_rollout_steps="$TOTAL_ROLLOUT_STEPS" \
  rollout.test_freq=20 \
  async_training.staleness_threshold="$STALENESS_THRESHOLD" \
  async_training.trigger_parameter_sync_step="$TRIGGER_PARAMETER_SYNC_STEP" \
  async_training.require_batches=1 \
  async_training.partial_rollout=True \
  trainer.save_freq=20 \
  trainer.project_name=DAPO \
  trainer.experiment_name=dapo_7b_math_fsdp2_4_4 \
  trainer.default_local_dir="$CKPTS_DIR" \
  "$@"
