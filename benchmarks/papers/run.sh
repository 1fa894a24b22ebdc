#!/usr/bin/env bash
# Runs the experiments of all papers, one after the other: JSON, tables and plots in OUTPUT_DIR (default runs/papers).
#
#   bash benchmarks/papers/run.sh [--small] [--smallest] [--output-dir OUTPUT_DIR]
#
# --small takes minutes on two CPU cores; without it the experiments are those of the papers and need GPUs.
# VENV  the environment to use (default: .venv in the repository)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${VENV:-.venv}/bin/python
export PYTHONPATH=$PWD:$PWD/kernels:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}
export OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false
out=runs/papers flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --small | --smallest) flags+=("$1") ;;
    --output-dir) out=${2:?--output-dir needs a folder}; shift ;;
    *) echo "run.sh: unknown argument $1; known are --small, --smallest and --output-dir OUTPUT_DIR" >&2; exit 2 ;;
  esac
  shift
done
for paper in areal_dta tree_training treepo das; do
  echo "== $paper"
  "$python" "benchmarks/papers/$paper.py" "${flags[@]}" --output-dir "$out/$paper"
done
echo "tables and plots: $out"
