#!/usr/bin/env bash
# Submits the training of a large model to Slurm; the command is shown first.
#
#   examples/submit_large.sh MODEL FOLDER ROLLOUTS SAVE [options of slurm/submit.sh] [-- arguments of training]
#
# MODEL is llama3_70b, qwen2.5_72b or qwen3_235b_a22b, FOLDER its Hugging Face checkpoint, ROLLOUTS a rollout file, SAVE where
# checkpoints go. The number of nodes is that which the argument file in this folder is made for. For example
#
#   examples/submit_large.sh llama3_70b /models/Llama-3.1-70B rollouts.parquet runs/first --dry-run --env site.sh -- --lr 1e-6
#
# What the run needs is said before by: python tools/plan_run.py ROLLOUTS --args-file examples/MODEL.args --num-gpus GPUS
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '2,/^set /p' "$0" | sed -e '$d' -e 's/^# \{0,1\}//' >&2
    exit 2
fi
model=$1 folder=$2 rollouts=$3 save=$4
shift 4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case $model in
    llama3_70b | qwen2.5_72b) nodes=4 ;;
    qwen3_235b_a22b) nodes=16 ;;
    *)
        echo "submit_large.sh: there is no model '$model'; the models are llama3_70b, qwen2.5_72b and qwen3_235b_a22b" >&2
        exit 2
        ;;
esac
submit=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    submit+=("$1")
    shift
done
[ $# -eq 0 ] || shift
exec "$here/../slurm/submit.sh" ${submit[@]+"${submit[@]}"} train --nodes "$nodes" --gpus-per-node 8 --exclusive -- \
    "@$here/$model.args" --load-hf "$folder" --rollouts "$rollouts" --save "$save" \
    --global-batch-size 512 --save-interval 20 --async-save "$@"
