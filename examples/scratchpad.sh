#!/usr/bin/env bash
# A small model learns addition from nothing, with long shared prompts, and what trees are worth in each phase of training.
#
#   bash examples/scratchpad.sh           # with the package installed: PYTHON=.venv/bin/python, say
#
# The task is in examples/scratchpad.py: prompts of worked examples and a problem, responses with a scratchpad.
#   1. supervised warm-up on a careless teacher's solutions
#   2. GRPO on prefix trees, judged on problems that no step ever saw
#   3. the same GRPO without sharing (--tree-mode dense), a few steps of it: seconds of each phase against those of 2
#   4. summary.json, learning.png and report.html
#
# SIZE   large (GPU: 100 million parameters, prompts of 480 tokens, 16 samples each), small (CPU) or tiny (a smoke test);
#        default: large where there is a GPU
# OUT    where results go (default: runs/scratchpad); earlier results of this script in it are replaced
# SEED   of weights, order of problems and sampling (default: 1)
# PYTHON the interpreter (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/scratchpad}
seed=${SEED:-1}
size=${SIZE:-$("$python" -c 'import torch; print("large" if torch.cuda.is_available() else "small")')}

case $size in
large)
  task=(--base 10 --digits 24 --examples 2 --carelessness 0.1)
  model=(--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --num-query-groups 4
    --rotary-base 1000 --max-position-embeddings 576 --bf16)
  tree=(--tree-segment-tokens 8192)
  warmup=(--global-batch-size 64 --train-iters "${WARMUP_STEPS:-300}" --lr 5e-4 --lr-warmup-iters 20)
  sampling=(--rollout-max-response-len 96 --rollout-batch-size 32 --n-samples-per-prompt 16
    --inference-max-requests 512)
  rates=(--lr 1e-5) steps=${STEPS:-120} dense_steps=${DENSE_STEPS:-24} solved=${SOLVED:-19200}
  ;;
small)
  task=(--base 4 --digits 8 --examples 2 --carelessness 0.25)
  model=(--num-layers 2 --hidden-size 128 --num-attention-heads 4 --rotary-base 100 --max-position-embeddings 192)
  tree=(--tree-segment-tokens 1024)
  warmup=(--global-batch-size 16 --train-iters "${WARMUP_STEPS:-200}" --lr 2e-3 --lr-warmup-iters 20)
  sampling=(--rollout-max-response-len 32 --rollout-batch-size 16 --n-samples-per-prompt 8)
  rates=(--lr 2e-4) steps=${STEPS:-120} dense_steps=${DENSE_STEPS:-12} solved=${SOLVED:-3200}
  ;;
tiny)
  task=(--base 2 --digits 6 --examples 1 --carelessness 0.1 --prompts 64 --held-out 4)
  model=(--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 96)
  tree=(--tree-segment-tokens 64)
  warmup=(--global-batch-size 4 --train-iters "${WARMUP_STEPS:-2}" --lr 1e-3)
  sampling=(--rollout-max-response-len 24 --rollout-batch-size 2 --n-samples-per-prompt 4)
  rates=(--lr 1e-3) steps=${STEPS:-6} dense_steps=${DENSE_STEPS:-4} solved=${SOLVED:-8}
  ;;
*)
  echo "error: SIZE=$size is unknown; give large, small or tiny" >&2
  exit 2
  ;;
esac
model+=(--vocab-size 16 --swiglu --disable-bias-linear --qk-layernorm --seed "$seed")
adam=(--weight-decay 0 --adam-beta2 0.95 --lr-decay-style linear)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
started=$SECONDS
mkdir -p "$out"
rm -rf "$out/warmup" "$out/dta" "$out/dense"

echo "== 1. supervised warm-up"
"$python" examples/scratchpad.py --output "$out/data" "${task[@]}" --count "$solved" --seed "$seed"
"$python" -m megatron_dta.train "${model[@]}" "${tree[@]}" "${adam[@]}" "${warmup[@]}" --min-lr 1e-5 \
  --objective sft --rollouts "$out/data/warmup.jsonl" --save "$out/warmup" --log-interval 50

grpo() { # MODE STEPS: GRPO from the warmed-up weights, two optimizer steps a collection
  "$python" -m megatron_dta.train "${model[@]}" "${tree[@]}" "${adam[@]}" "${sampling[@]}" "${rates[@]}" \
    --tree-mode "$1" --train-iters "$2" --lr-warmup-iters 4 --lr-decay-iters "$steps" --num-steps-per-rollout 2 --old-logprobs recompute \
    --load "$out/warmup" --finetune --prompt-data "$out/data/prompts.jsonl" \
    --tokenizer-type CharacterTokenizer --reward-function examples/scratchpad.py:reward \
    --save "$out/$1" --log-interval 10 "${@:3}"
}
echo "== 2. GRPO on prefix trees: $steps steps"
grpo dta "$steps" --eval-prompt-data "$out/data/held_out.jsonl" --eval-interval $((steps > 6 ? steps / 6 : 1)) \
  --save-rollouts-interval "$steps"
echo "== 3. the same without sharing: $dense_steps steps"
grpo dense "$dense_steps"

echo "== 4. what it showed"
"$python" tools/report_run.py "$out/dta" --prompts 2 --output "$out/report.html"
"$python" examples/scratchpad_report.py "$out"
echo "it took $((SECONDS - started)) seconds"
