#!/usr/bin/env bash
# A small student learns addition from a larger teacher, on its own samples, faster than from rewards alone. On the CPU.
#
#   bash examples/distillation.sh          # with the package installed: PYTHON=.venv/bin/python, say
#
# The task is that of examples/scratchpad.sh.
#   1. the teacher: 4 layers of 128, supervised on careful solutions, exported to Hugging Face's form
#   2. the student: 2 layers of 64, supervised so briefly on careless solutions that almost none of its own is right
#   3. from the same student, with the same prompts and seeds: GRPO alone; the teacher alone (reverse KL over the whole
#      vocabulary); the teacher in addition to rewards; the teacher on sampled tokens
#   4. curves.png and curves.json: the held-out reward of all four
#
# STEPS  optimizer steps of each run (default: 100)
# OUT    where results go (default: runs/distillation); its teacher is kept, other results in it are replaced
# PYTHON the interpreter (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-runs/distillation} steps=${STEPS:-100}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
common=(--vocab-size 16 --swiglu --disable-bias-linear --qk-layernorm --max-position-embeddings 192 --rotary-base 100
  --seed 1 --tree-segment-tokens 1024 --weight-decay 0 --adam-beta2 0.95 --lr-decay-style linear)
teacher=(--num-layers 4 --hidden-size 128 --num-attention-heads 4)
student=(--num-layers 2 --hidden-size 64 --num-attention-heads 4)
started=$SECONDS
mkdir -p "$out"
rm -rf "$out/student" "$out"/run-*

echo "== 1. the teacher"
"$python" examples/scratchpad.py --output "$out/careful" --base 4 --digits 6 --examples 2 --carelessness 0 --count 8000
if [ ! -d "$out/teacher-hf" ]; then
  "$python" -m megatron_dta.train "${common[@]}" "${teacher[@]}" --objective sft --rollouts "$out/careful/warmup.jsonl" \
    --global-batch-size 32 --train-iters "${TEACHER_STEPS:-1200}" --lr 2e-3 --min-lr 1e-5 --lr-warmup-iters 20 \
    --save "$out/teacher" --save-hf "$out/teacher-hf" --log-interval 100
fi
echo "== 2. the student"
"$python" examples/scratchpad.py --output "$out/careless" --base 4 --digits 6 --examples 2 --carelessness 0.25 --count 8000
"$python" -m megatron_dta.train "${common[@]}" "${student[@]}" --objective sft --rollouts "$out/careless/warmup.jsonl" \
  --global-batch-size 16 --train-iters "${WARMUP_STEPS:-200}" --lr 2e-3 --min-lr 1e-5 --lr-warmup-iters 20 \
  --save "$out/student" --log-interval 100

run() { # NAME LR FLAGS: training on the student's own samples
  echo "== 3. $1"
  "$python" -m megatron_dta.train "${common[@]}" "${student[@]}" --load "$out/student" --finetune --lr "$2" --lr-warmup-iters 4 \
    --train-iters "$steps" --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 26 \
    --prompt-data "$out/careful/prompts.jsonl" --eval-prompt-data "$out/careful/held_out.jsonl" --eval-interval 10 \
    --tokenizer-type CharacterTokenizer --reward-function examples/scratchpad.py:reward \
    --save "$out/run-$1" --log-interval 10 "${@:3}"
}
taught=(--teacher-load-hf "$out/teacher-hf" --teacher-coef 1)
run grpo 5e-4
run teacher 1e-3 "${taught[@]}" --teacher-only
run teacher-and-rewards 1e-3 "${taught[@]}"
run teacher-sampled 1e-3 "${taught[@]}" --teacher-only --teacher-kl sampled-tokens

echo "== 4. curves"
"$python" examples/distillation_report.py "$out"
echo "it took $((SECONDS - started)) seconds"
