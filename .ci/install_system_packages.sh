#!/usr/bin/env bash
# Install the Debian packages that the tests use: slurm and munge (the SLURM recipe), shellcheck (scripts), prometheus, and
# chromium with its driver (pages). Installs only what is missing; prints nothing when nothing is.
set -euo pipefail

packages=(slurm-wlm munge shellcheck chromium chromium-driver prometheus)

missing=()
for package in "${packages[@]}"; do
  dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  as_root=(sudo --non-interactive)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "installing ${missing[*]}"
# Services must not start by themselves: the tests run their own, in folders of their own.
if ! {
  "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}"
} >"$log" 2>&1; then
  cat "$log" >&2
  echo "cannot install ${missing[*]}; install them by hand and run again" >&2
  exit 1
fi
