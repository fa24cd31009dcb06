#!/usr/bin/env bash
# Make a separate environment for an SGLang server: install_sglang_server_env.sh [VENV]
#
# SGLang pins torch and many other packages exactly (torch 2.14.1 in 0.5.23), at other versions than this library is
# tested with, so the two need separate environments. The trainer sends requests over loopback or the cluster network.
# SGLang needs an NVIDIA GPU: it has no CPU build.
set -euo pipefail

venv=${1:-.venv-sglang}
version=${SGLANG_VERSION:-0.5.23}
if ! command -v nvidia-smi >/dev/null; then
  echo "no NVIDIA driver here: SGLang has no CPU build; use rollout.name=native or vllm" >&2
  exit 1
fi
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "sglang==$version"
"$venv/bin/python" -c 'import sglang; print("SGLang", sglang.__version__, "is ready")'
