# shellcheck shell=bash
# Variables and settings that all recipes for Qwen3-8B share; a script sources it, then calls
#   train key=value ...
# Every variable can be set in front of the command that starts the script; later overrides take precedence.
set -euo pipefail

if [[ -z ${DEVICE:-} ]]; then
  if command -v npu-smi >/dev/null; then DEVICE=npu; else DEVICE=gpu; fi
fi
INFER_BACKEND=${INFER_BACKEND:-native} # native, vllm, sglang or trtllm
MACHINE=${MACHINE:-}                   # gb200 for that machine's settings
MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen/Qwen3-8B}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
TEST_FILE=${TEST_FILE:-$HOME/data/gsm8k/test.parquet}

NNODES=${NNODES:-1}
if [[ $DEVICE == npu ]]; then
  DEVICES_PER_NODE=${NPUS_PER_NODE:-null}
else
  DEVICES_PER_NODE=${NGPUS_PER_NODE:-null} # null: all detected devices
fi

TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-1024}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-256}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-24576}
ACTOR_LR=${ACTOR_LR:-1e-6}
ENTROPY_COEFF=${ENTROPY_COEFF:-0}
ROLLOUT_TP=${ROLLOUT_TP:-1}
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.6}
ROLLOUT_N=${ROLLOUT_N:-8}
SP_SIZE=${SP_SIZE:-1}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-15}
SAVE_FREQ=${SAVE_FREQ:-20}
TEST_FREQ=${TEST_FREQ:-5}
RECIPE=$(basename "$(dirname "$0")" _trainer)
PROJECT_NAME=${PROJECT_NAME:-verl_${RECIPE}_gsm8k}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3_8b_fsdp_$INFER_BACKEND}

run=(python3)
if [[ ${VERL_USE_UV:-0} == 1 ]]; then
  run=(uv run python3)
fi

OFFLOAD=False MODEL_DTYPE=fp32
options=()
if [[ $DEVICE == npu ]]; then
  export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1500}
  export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
  if [[ $INFER_BACKEND == sglang ]]; then
    options+=(+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=ascend)
  fi
elif command -v rocm-smi >/dev/null; then
  OFFLOAD=True # parameters, gradients and optimiser state of 8B do not fit together with the rollout
fi
if [[ $MACHINE == gb200 ]]; then
  MODEL_DTYPE=bfloat16
  options+=(actor_rollout_ref.rollout.enforce_eager=True)
  if [[ $INFER_BACKEND == sglang ]]; then
    options+=(+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=flashinfer)
  fi
fi

train() {
  "${run[@]}" -m verl.trainer.main_ppo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$TRAIN_FILE" \
    data.val_files="$TEST_FILE" \
    data.train_batch_size="$TRAIN_BATCH_SIZE" \
    data.max_prompt_length="$MAX_PROMPT_LENGTH" \
    data.max_response_length="$MAX_RESPONSE_LENGTH" \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr="$ACTOR_LR" \
    actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE" \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU" \
    actor_rollout_ref.actor.entropy_coeff="$ENTROPY_COEFF" \
    actor_rollout_ref.actor.fsdp_config.model_dtype="$MODEL_DTYPE" \
    actor_rollout_ref.actor.fsdp_config.param_offload="$OFFLOAD" \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload="$OFFLOAD" \
    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size="$SP_SIZE" \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU" \
    actor_rollout_ref.rollout.name="$INFER_BACKEND" \
    actor_rollout_ref.rollout.n="$ROLLOUT_N" \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP" \
    actor_rollout_ref.rollout.gpu_memory_utilization="$ROLLOUT_GPU_MEM_UTIL" \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU" \
    trainer.nnodes="$NNODES" \
    trainer.n_gpus_per_node="$DEVICES_PER_NODE" \
    trainer.total_epochs="$TOTAL_EPOCHS" \
    trainer.save_freq="$SAVE_FREQ" \
    trainer.test_freq="$TEST_FREQ" \
    trainer.project_name="$PROJECT_NAME" \
    trainer.experiment_name="$EXPERIMENT_NAME" \
    "${options[@]}" \
    "$@"
}
