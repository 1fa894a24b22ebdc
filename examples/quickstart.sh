#!/usr/bin/env bash
# From nothing to a small model that has learned addition by reinforcement learning on prefix trees, on a CPU.
#
#   bash examples/quickstart.sh
#
# Makes a virtual environment, installs, and then in about five minutes on 2 cores:
#   1. supervised warm-up: a few steps on solved problems, so that the model knows what an answer looks like
#   2. GRPO: 8 samples a problem, trained as prefix trees, judged on problems that no step ever saw
#   3. pictures: the reward, a prefix tree of rollouts, and a page with everything (report.html)
#
# VENV   the environment to use or make (default: .venv-quickstart in the repository)
# PYTHON the interpreter to make it with (default: python3)
# OUT    where results go (default: runs/quickstart); earlier results of this script in it are replaced
# SEED   of weights, order of problems and sampling (default: 1)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-quickstart}
out=${OUT:-runs/quickstart}
seed=${SEED:-1}

echo "== install into $venv"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
bash examples/install.sh "$venv"
python=$venv/bin/python
# More threads than this only wait for each other on a model of 0.4 million parameters.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
started=$SECONDS
mkdir -p "$out"
rm -rf "$out/warmup" "$out/grpo"

model=(--num-layers 2 --hidden-size 128 --num-attention-heads 8 --swiglu --disable-bias-linear
  --max-position-embeddings 32 --vocab-size 16)
# A batch is a few hundred unique tokens: with small segments it is cut at all.
tree=(--tree-segment-tokens 256)
# a + b with operands up to 49; 256 of the 2,500 problems (and their mirrors b + a) are held out.
task=(--task arithmetic --arithmetic-max-operand 49 --rollout-max-response-len 4
  --rollout-batch-size 64 --n-samples-per-prompt 8)
warmup_steps=120

echo "== 1. supervised warm-up: $warmup_steps steps of 128 solved problems"
"$python" -m megatron_dta.sampling.prompts.arithmetic --output "$out/warmup.jsonl" \
  --count $((128 * warmup_steps)) --arithmetic-max-operand 49 --seed "$seed"
"$python" -m megatron_dta.train "${model[@]}" "${tree[@]}" --seed "$seed" \
  --objective sft --rollouts "$out/warmup.jsonl" --global-batch-size 128 \
  --train-iters $warmup_steps --lr 1e-3 --save "$out/warmup" --log-interval 40

echo "== 2. GRPO from the warmed-up weights: 800 steps of 64 problems x 8 samples"
"$python" -m megatron_dta.train "${model[@]}" "${tree[@]}" "${task[@]}" --seed "$seed" \
  --load "$out/warmup" --finetune \
  --train-iters 800 --lr 6e-4 --lr-warmup-iters 10 --lr-decay-style linear --weight-decay 0 --adam-beta2 0.95 \
  --save "$out/grpo" --eval-interval 100 --log-interval 100 \
  --save-rollouts-interval 200 --keep-best-checkpoint eval_reward

echo "== 3. rollouts of the trained model as a prefix tree"
"$python" tools/sample_rollouts.py "${model[@]}" "${task[@]}" --seed "$seed" \
  --load "$out/grpo" --rollout-batch-index 800 --output "$out/rollouts.jsonl"
"$python" tools/inspect_tree.py "$out/rollouts.jsonl" "${tree[@]}" --plot "$out/tree.png"

"$python" tools/report_run.py "$out/grpo" --output "$out/report.html"

"$python" examples/quickstart_report.py "$out"
echo "training and pictures took $((SECONDS - started)) seconds"
