#!/usr/bin/env bash
# Installs megatron_dta with its test extras into a virtual environment and runs the test-suite on the CPU.
#
#   bash tests/run.sh [pytest arguments]
#   bash tests/run.sh quick                  the unit tests that start no processes, under a minute
#
# VENV    the environment to use or make (default: .venv in the repository)
# PYTHON  the interpreter to make it with (default: python3)
# WORKERS test files that run at once (default: one for each core, 4 at most)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
bash examples/install.sh "$venv" test
# Threads that spin while they wait slow each other down where cores are shared.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false
if [ "${1:-}" = quick ]; then
  shift
  set -- tests/unit/tree tests/unit/rollouts tests/unit/objectives tests/unit/planning "$@"
fi
"$venv/bin/python" -m pytest -q -n "${WORKERS:-auto}" --maxprocesses 4 --dist loadfile "$@"
