#!/usr/bin/env bash
# Several machines under SLURM: start a container on each node and a Ray cluster, check the cluster, run a command.
#
#   sbatch --nodes=2 --export=ALL,IMAGE=my/verl:rocm,COMMAND="bash examples/grpo_trainer/run_qwen3_8b_fsdp.sh" \
#     scripts/slurm/slurm_script.sh
#
# CONTAINER  docker, podman, or none for the node's own environment   (docker)
# IMAGE      the container image; build one from docker/              (required unless CONTAINER=none)
# VENDOR     amd, nvidia, ascend, or none                              (amd)
# WORKDIR    the checkout, mounted at the same path                    (the folder of submission)
# MOUNTS     more folders to mount at the same path, colon-separated   (the home folder)
# COMMAND    command for the first node, run when the cluster is up    (GRPO of examples/grpo_trainer)
# RAY        the ray program inside the container                      (ray)
# RAY_PORT   port of the head                                          (6379)
# START_TIMEOUT_S  how long to wait for all nodes to join              (300)
#SBATCH --job-name=verl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output=%x-%j.log
set -euo pipefail
set -o monitor # a process group for each background job, so that one signal ends the job with its children

CONTAINER=${CONTAINER:-docker}
VENDOR=${VENDOR:-amd}
WORKDIR=${WORKDIR:-${SLURM_SUBMIT_DIR:-$PWD}}
MOUNTS=${MOUNTS:-$HOME}
COMMAND=${COMMAND:-bash examples/grpo_trainer/run_qwen3_8b_fsdp.sh trainer.nnodes=$SLURM_JOB_NUM_NODES}
RAY=${RAY:-ray}
PYTHON=${PYTHON:-python3}
RAY_PORT=${RAY_PORT:-6379}
START_TIMEOUT_S=${START_TIMEOUT_S:-300}
GPUS=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}
NAME=verl_${SLURM_JOB_ID:?run me with sbatch}

if [[ $CONTAINER != none && -z ${IMAGE:-} ]]; then
  echo "IMAGE is not set: give a container image, or CONTAINER=none" >&2
  exit 2
fi

# --- variables of the vendor's runtime and of Ray, set before ray starts ---------------------------------------------

every=$(seq --separator=, 0 $((GPUS > 0 ? GPUS - 1 : 0)))
case $VENDOR in
amd)
  export HIP_VISIBLE_DEVICES=$every
  # Ray 2.45 and newer reads the first variable, older Ray the second: Ray must not hide devices from the workers.
  export RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES=1
  export RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES=1
  export HSA_NO_SCRATCH_RECLAIM=1
  devices=(--device /dev/kfd --device /dev/dri --group-add video)
  passed=(HIP_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES
    HSA_NO_SCRATCH_RECLAIM)
  ;;
nvidia)
  export RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1
  devices=(--gpus all)
  if [[ $CONTAINER == podman ]]; then
    devices=(--device nvidia.com/gpu=all)
  fi
  passed=(RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)
  ;;
ascend)
  export ASCEND_RT_VISIBLE_DEVICES=$every
  export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
  export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1500}
  devices=(--device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc
    --volume /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro)
  for index in ${every//,/ }; do
    devices+=(--device "/dev/davinci$index")
  done
  passed=(ASCEND_RT_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES HCCL_CONNECT_TIMEOUT)
  ;;
none)
  devices=()
  passed=()
  ;;
*)
  echo "VENDOR=$VENDOR is none of amd, nvidia, ascend, none" >&2
  exit 2
  ;;
esac
# A token of the job's own: other users of the nodes cannot join its Ray. Without one, a token that Ray once left in the
# home folder is asked for by the head alone, and no node joins.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
passed+=(RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_ADDRESS NNODES NGPUS_PER_NODE MODEL_PATH TRAIN_FILE TEST_FILE WANDB_API_KEY)

# --- nodes and how to run something on them --------------------------------------------------------------------------

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

address_of() { # the IPv4 address by which SLURM reaches a node
  local name
  name=$(scontrol show node --oneliner "$1" | grep --only-matching --perl-regexp 'NodeAddr=\K\S+')
  getent ahostsv4 "$name" | awk 'NR == 1 {print $1}'
}

on() { # on NODE COMMAND...: on the node itself
  local node=$1
  shift
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$@"
}

inside() { # inside NODE COMMAND...: in the node's container
  local node=$1
  shift
  case $CONTAINER in
  none) on "$node" --chdir="$WORKDIR" "$@" ;;
  *)
    local names=() name
    for name in "${passed[@]}"; do
      names+=(--env "$name")
    done
    on "$node" "$CONTAINER" exec "${names[@]}" --workdir "$WORKDIR" "$NAME" "$@"
    ;;
  esac
}

start_container() {
  local node=$1 volumes=(--volume "$WORKDIR:$WORKDIR") folder
  for folder in ${MOUNTS//:/ }; do
    volumes+=(--volume "$folder:$folder")
  done
  on "$node" "$CONTAINER" run --detach --rm --name "$NAME" \
    --network=host --ipc=host --privileged --cap-add=SYS_PTRACE --security-opt seccomp=unconfined \
    --ulimit memlock=-1 --ulimit stack=67108864 \
    "${devices[@]}" "${volumes[@]}" "$IMAGE" sleep infinity
}

stop_everything() {
  local status=$?
  trap - EXIT
  for ray in "${rays[@]}"; do
    kill -TERM -- "-$ray" 2>/dev/null || true # the process group of srun, which ends its step on the node
  done
  for ray in "${rays[@]}"; do
    wait "$ray" 2>/dev/null || true
  done
  if [[ $CONTAINER != none ]]; then
    for node in "${nodes[@]}"; do
      on "$node" "$CONTAINER" rm --force "$NAME" >/dev/null || echo "could not remove $NAME on $node" >&2
    done
  fi
  exit "$status"
}
rays=()
trap stop_everything EXIT

# --- containers, Ray, check, command ---------------------------------------------------------------------------------

if [[ $CONTAINER != none ]]; then
  for node in "${nodes[@]}"; do
    echo "starting $CONTAINER container $NAME on $node"
    start_container "$node"
  done
fi

head=${nodes[0]}
head_address=$(address_of "$head")
export RAY_ADDRESS=$head_address:$RAY_PORT
echo "ray head on $head ($RAY_ADDRESS)"
inside "$head" "$RAY" start --head --node-ip-address="$head_address" --port="$RAY_PORT" --num-gpus="$GPUS" \
  --num-cpus="${SLURM_CPUS_ON_NODE:-1}" --disable-usage-stats --include-dashboard=false --block &
rays+=($!)

# A worker that connects before the head listens gives up: wait for the port.
for ((second = 0; ; second++)); do
  if (exec 3<>"/dev/tcp/$head_address/$RAY_PORT") 2>/dev/null; then
    break
  fi
  if ((second >= START_TIMEOUT_S)) || ! kill -0 "${rays[0]}" 2>/dev/null; then
    echo "the ray head on $head does not answer at $RAY_ADDRESS after $second s" >&2
    exit 1
  fi
  sleep 1
done

for node in "${nodes[@]:1}"; do
  address=$(address_of "$node")
  echo "ray worker on $node ($address)"
  inside "$node" "$RAY" start --address="$RAY_ADDRESS" --node-ip-address="$address" --num-gpus="$GPUS" \
    --num-cpus="${SLURM_CPUS_ON_NODE:-1}" --disable-usage-stats --block &
  rays+=($!)
done

inside "$head" "$PYTHON" scripts/slurm/ray_smoke.py --nodes "${#nodes[@]}" --gpus-per-node "$GPUS" \
  --timeout-s "$START_TIMEOUT_S"

echo "running: $COMMAND"
inside "$head" bash -c "$COMMAND"
