#!/usr/bin/env bash
# PPO with a critic and a reward model in the trainer's ranks, Qwen2-7B; token budgets, sequences balanced over ranks.
# The actor's budget is 3 x (prompt + response); those of the critic, the reward model and the log-probs are 4 x.
#
#   MODEL_PATH=DIR REWARD_MODEL_PATH=DIR bash examples/ppo_trainer/run_qwen2-7b_rm_seq_balance.sh [key=value ...]
MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen2-7B-Instruct}
REWARD_MODEL_PATH=${REWARD_MODEL_PATH:-$HOME/models/sfairXC/FsfairX-LLaMA3-RM-v0.1}
TRAIN_FILE=${TRAIN_FILE:-${GSM8K_TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}}
TEST_FILE=${TEST_FILE:-${GSM8K_TEST_FILE:-$HOME/data/gsm8k/test.parquet}}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-4096}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
ROLLOUT_N=${ROLLOUT_N:-1}
CRITIC_LR=${CRITIC_LR:-1e-5}
PROJECT_NAME=${PROJECT_NAME:-verl_example_gsm8k}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen2_7b_rm_seq_balance}
sequence=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-$((3 * sequence))}
FORWARD_MAX_TOKEN_LEN_PER_GPU=${FORWARD_MAX_TOKEN_LEN_PER_GPU:-$((4 * sequence))}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=gae \
  algorithm.kl_ctrl.kl_coef=0.001 \
  data.return_raw_chat=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$FORWARD_MAX_TOKEN_LEN_PER_GPU" \
  critic.model.path="${CRITIC_MODEL_PATH:-$MODEL_PATH}" \
  critic.model.use_remove_padding=True \
  critic.model.enable_gradient_checkpointing=True \
  critic.optim.lr="$CRITIC_LR" \
  critic.use_dynamic_bsz=True \
  critic.ppo_max_token_len_per_gpu="$FORWARD_MAX_TOKEN_LEN_PER_GPU" \
  critic.forward_max_token_len_per_gpu="$FORWARD_MAX_TOKEN_LEN_PER_GPU" \
  reward.reward_model.enable=True \
  reward.reward_model.model_path="$REWARD_MODEL_PATH" \
  reward.reward_model.use_dynamic_bsz=True \
  reward.reward_model.forward_max_token_len_per_gpu="$FORWARD_MAX_TOKEN_LEN_PER_GPU" \
  reward.reward_model.ulysses_sequence_parallel_size="$SP_SIZE" \
  trainer.critic_warmup=0 \
  trainer.balance_batch=True \
  "$@"
