#!/usr/bin/env bash
# PPO with a critic and a served reward model, Qwen2-7B; token budgets, sequences balanced over ranks.
# The actor's budget is 3 x (prompt + response); those of the critic and of forward-only passes are 4 x.
#
#   bash examples/ppo_trainer/run_qwen2-7b_rm_seq_balance.sh [key=value ...]
set -euo pipefail

INFER_BACKEND=${INFER_BACKEND:-native}
MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen2-7B-Instruct}
CRITIC_MODEL_PATH=${CRITIC_MODEL_PATH:-$MODEL_PATH}
REWARD_MODEL_PATH=${REWARD_MODEL_PATH:-$HOME/models/sfairXC/FsfairX-LLaMA3-RM-v0.1}
GSM8K_TRAIN_FILE=${GSM8K_TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
GSM8K_TEST_FILE=${GSM8K_TEST_FILE:-$HOME/data/gsm8k/test.parquet}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-null}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-4096}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-15}

sequence=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=gae \
  algorithm.kl_ctrl.kl_coef=0.001 \
  data.train_files="$GSM8K_TRAIN_FILE" \
  data.val_files="$GSM8K_TEST_FILE" \
  data.train_batch_size=1024 \
  data.max_prompt_length="$MAX_PROMPT_LENGTH" \
  data.max_response_length="$MAX_RESPONSE_LENGTH" \
  data.return_raw_chat=True \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((3 * sequence))" \
  actor_rollout_ref.rollout.name="$INFER_BACKEND" \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((4 * sequence))" \
  critic.model.path="$CRITIC_MODEL_PATH" \
  critic.model.use_remove_padding=True \
  critic.model.enable_gradient_checkpointing=True \
  critic.optim.lr=1e-5 \
  critic.use_dynamic_bsz=True \
  critic.ppo_max_token_len_per_gpu="$((4 * sequence))" \
  critic.forward_max_token_len_per_gpu="$((4 * sequence))" \
  reward.reward_model.enable=True \
  reward.reward_model.model_path="$REWARD_MODEL_PATH" \
  trainer.critic_warmup=0 \
  trainer.balance_batch=True \
  trainer.nnodes="$NNODES" \
  trainer.n_gpus_per_node="$NGPUS_PER_NODE" \
  trainer.total_epochs="$TOTAL_EPOCHS" \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.project_name=verl_example_gsm8k \
  trainer.experiment_name=qwen2_7b_rm_seq_balance \
  "$@"
