#!/usr/bin/env bash
# TreePO on a CPU: rollouts sampled as trees and trained as the same trees, against GRPO at equal decoded tokens.
#
#   bash examples/quickstart_treepo.sh
#
# Makes a virtual environment, installs, and then in a few minutes on 2 cores:
#   1. supervised warm-up on solved problems
#   2. GRPO: 8 independent rollouts a problem
#   3. TreePO: a tree of 8 leaves a problem that branches after each token, with tree-based advantages; more steps than
#      GRPO, because a step decodes fewer tokens
#   4. held-out reward over decoded tokens; pass@k and maj@k of both ways to sample the trained model
#
# VENV, PYTHON, OUT (default: runs/quickstart_treepo) and SEED as for examples/quickstart.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-quickstart}
out=${OUT:-runs/quickstart_treepo}
seed=${SEED:-1}

echo "== install into $venv"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
bash examples/install.sh "$venv"
python=$venv/bin/python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONDONTWRITEBYTECODE=
started=$SECONDS
mkdir -p "$out"
rm -rf "$out/warmup" "$out/grpo" "$out/treepo"

model=(--num-layers 2 --hidden-size 128 --num-attention-heads 8 --swiglu --disable-bias-linear
  --max-position-embeddings 32 --vocab-size 16 --tree-segment-tokens 256)
task=(--task arithmetic --arithmetic-max-operand 49 --rollout-max-response-len 4
  --rollout-batch-size 64 --n-samples-per-prompt 8)
training=(--load "$out/warmup" --finetune --lr 6e-4 --lr-warmup-iters 10 --lr-decay-style linear --weight-decay 0
  --adam-beta2 0.95 --eval-interval 50 --log-interval 100)
# Four first digits, and two branches after each of them; 20 tokens where independent rollouts decode 24.
shape=(--treepo-segment-length 1 --treepo-initial-branches 4)
tree=(--rollout-method treepo "${shape[@]}" --advantage-estimator treepo)
warmup_steps=120

echo "== 1. supervised warm-up: $warmup_steps steps of 128 solved problems"
"$python" -m megatron_dta.sampling.prompts.arithmetic --output "$out/warmup.jsonl" \
  --count $((128 * warmup_steps)) --arithmetic-max-operand 49 --seed "$seed"
"$python" -m megatron_dta.train "${model[@]}" --seed "$seed" \
  --objective sft --rollouts "$out/warmup.jsonl" --global-batch-size 128 \
  --train-iters $warmup_steps --lr 1e-3 --save "$out/warmup" --log-interval 40

echo "== 2. GRPO on independent rollouts: 800 steps"
"$python" -m megatron_dta.train "${model[@]}" "${task[@]}" "${training[@]}" --seed "$seed" \
  --train-iters 800 --save "$out/grpo"

echo "== 3. TreePO on sampled trees: 960 steps"
"$python" -m megatron_dta.train "${model[@]}" "${task[@]}" "${tree[@]}" "${training[@]}" --seed "$seed" \
  --train-iters 960 --save "$out/treepo"

echo "== 4. the model trained on trees, sampled both ways on 256 held-out problems"
"$python" tools/evaluate_sampling.py "${model[@]}" "${task[@]}" --load "$out/treepo" "${shape[@]}" --seed "$seed" \
  --n-samples-per-eval-prompt 8 --k 1 2 4 8 --output "$out/evaluation.json"

"$python" examples/quickstart_treepo_report.py "$out"
echo "training and pictures took $((SECONDS - started)) seconds"
