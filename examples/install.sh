#!/usr/bin/env bash
# Installs megatron_dta with the named extras into a virtual environment; with torch, of which a CPU build is enough for a CPU.
#
#   bash examples/install.sh VENV [EXTRAS [PACKAGES ...]]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
extras=${2:-}
# Nothing to do where this very installation was made before. After changing an environment by hand, delete the file.
described=$({ echo "$PWD" "${@:2}"; cat setup.py pyproject.toml examples/install.sh; } | cksum)
installed=$venv/installed-${described%% *}
[ ! -e "$installed" ] || exit 0
packages=("${@:3}" --editable ".${extras:+[$extras]}")
# The version that the tests were run with; a machine with its own torch keeps it.
"$venv/bin/python" -c "import torch" 2>/dev/null || packages=("torch==2.13.0" "${packages[@]}")
# Most modules of the packages are never imported; those that are get their bytecode then.
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "${packages[@]}"
touch "$installed"
