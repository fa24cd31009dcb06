#!/usr/bin/env bash
# Install this checkout into a virtual environment: install.sh VENV [EXTRA,...] [ARGUMENT of pip install...]
#
# torch is installed first, so that no other package installs another build of it: the CPU build without an NVIDIA
# driver (a tenth of the download), otherwise the default build. TORCH=skip keeps an installed torch. CONSTRAINTS names
# the file of pins. uv installs the rest, many downloads at once, and pip where uv cannot; INSTALLER=pip asks for pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:?usage: scripts/install.sh VENV [EXTRA,...] [ARGUMENT of pip install...]}
extras=${2:+[$2]}
more=("${@:3}")
cpu_index=https://download.pytorch.org/whl/cpu
constraints=${CONSTRAINTS:-constraints.txt}
torch=$(sed -n 's/^torch==//p' "$constraints")

echo "installing into $venv; the first time takes some minutes, most of them for the download of torch"
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)

"$venv/bin/python" -c 'import sys; sys.exit(f"Python {sys.version.split()[0]} is too old, 3.11 is needed; set PYTHON=...") if sys.version_info < (3, 11) else None'

# uv reads no settings of pip: it gets the index that pip has in place of PyPI, and is left out where pip has none.
uv_install() {
  local settings index
  [[ ${INSTALLER:-uv} == uv ]] || return 1
  settings=$("${pip[@]}" config list)
  ! grep -q "\.no-index=" <<<"$settings" || return 1
  index=$(sed -n "s/^.*\.index-url='\(.*\)'$/\1/p" <<<"$settings" | tail -1)
  "${pip[@]}" install --constraint "$constraints" uv &&
    "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" ${index:+--default-index "$index"} "$@"
}

if [[ ${TORCH:-} != skip ]]; then
  install_torch=("${pip[@]}" install --constraint "$constraints")
  if [[ $(uname -s) == Linux ]] && ! command -v nvidia-smi >/dev/null; then
    # PyPI has no CPU build for Linux: try a custom mirror, then PyTorch's index, and last the large default build
    "${install_torch[@]}" --no-deps "torch==$torch+cpu" 2>/dev/null ||
      "${install_torch[@]}" --no-deps --retries 1 --extra-index-url "$cpu_index" "torch==$torch+cpu" ||
      "${install_torch[@]}" "torch==$torch"
  else
    "${install_torch[@]}" "torch==$torch"
  fi
fi
everything=(--constraint "$constraints" --editable ".$extras" ${more[@]+"${more[@]}"})
uv_install "${everything[@]}" || {
  [[ ${INSTALLER:-uv} != uv ]] || echo "uv could not install this; pip does, which takes some minutes more"
  "${pip[@]}" install "${everything[@]}"
}
echo "installed into $venv in $SECONDS s. To use verl in this shell, type:  . $venv/bin/activate"
