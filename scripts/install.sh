#!/usr/bin/env bash
# Install this checkout into a virtual environment: install.sh VENV [EXTRA,...]
#
# torch is installed first, so that no other package installs another build of it: the CPU build without an NVIDIA
# driver (a tenth of the download), otherwise the default build. TORCH=skip keeps an installed torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:?usage: scripts/install.sh VENV [EXTRA,...]}
extras=${2:+[$2]}
cpu_index=https://download.pytorch.org/whl/cpu
torch=$(sed -n 's/^torch==//p' constraints.txt)

echo "installing into $venv; the first time takes some minutes, most of them for the download of torch"
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)

"$venv/bin/python" -c 'import sys; sys.exit(f"Python {sys.version.split()[0]} is too old, 3.11 is needed; set PYTHON=...") if sys.version_info < (3, 11) else None'

if [[ ${TORCH:-} != skip ]]; then
  if [[ $(uname -s) == Linux ]] && ! command -v nvidia-smi >/dev/null; then
    # PyPI has no CPU build for Linux: try a custom mirror, then PyTorch's index, and last the large default build
    "${install[@]}" "torch==$torch+cpu" 2>/dev/null ||
      "${install[@]}" --no-deps --retries 1 --extra-index-url "$cpu_index" "torch==$torch+cpu" ||
      "${install[@]}" "torch==$torch"
  else
    "${install[@]}" "torch==$torch"
  fi
fi
"${install[@]}" --editable ".$extras"
echo "installed into $venv in $SECONDS s. To use verl in this shell, type:  . $venv/bin/activate"
