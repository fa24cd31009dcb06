#!/usr/bin/env bash
# DAPO: a higher upper clip range, mean over tokens, groups of equal scores sampled anew, and a penalty for answers
# that use the last part of the length budget. Source: arXiv 2503.14476, section 4.1.
#
#   MODEL_PATH=~/models/Qwen/Qwen3-8B bash examples/dapo_trainer/run_qwen3_8b_fsdp.sh [key=value ...]
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-512}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-32}
ROLLOUT_N=${ROLLOUT_N:-16}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-20480}
OVERLONG_BUFFER_LEN=${OVERLONG_BUFFER_LEN:-4096}
# shellcheck source=examples/qwen3_8b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../qwen3_8b.sh"

train \
  algorithm.adv_estimator=grpo \
  algorithm.filter_groups.enable=True \
  algorithm.filter_groups.metric=acc \
  algorithm.filter_groups.max_num_gen_batches=10 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.clip_ratio_c=10.0 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.optim.lr_warmup_steps=20 \
  actor_rollout_ref.actor.optim.weight_decay=0.1 \
  actor_rollout_ref.actor.use_kl_loss=False \
  reward.reward_manager.name=dapo \
  reward.reward_kwargs.overlong_buffer_cfg.enable=True \
  reward.reward_kwargs.overlong_buffer_cfg.len="$OVERLONG_BUFFER_LEN" \
  reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
  reward.reward_kwargs.max_resp_len="$MAX_RESPONSE_LENGTH" \
  "$@"
