#!/usr/bin/env bash
# Installs megatron_dta with the named extras into a virtual environment; torch first, so that a CPU build is enough for a CPU.
#
#   bash examples/install.sh VENV [EXTRAS]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
extras=${2:-}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
if ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
  # The version that the tests were run with; a machine with its own torch keeps it.
  pip "torch==2.13.0"
fi
pip --editable ".${extras:+[$extras]}"
