#!/usr/bin/env bash
# SmolLM2-135M-Instruct, a real chat model, learns by GRPO on a GPU in minutes, on prefix trees and without sharing.
#
#   bash examples/real_model.sh           # with the package installed with [gguf]: PYTHON=.venv/bin/python, say
#
#   1. the model, as a Hugging Face folder (examples/real_model/smollm2.py)
#   2. TASK=sums: from the model as it is; TASK=lists: after supervised training on solved lists
#   3. GRPO, once for each of RUNS
#   4. the held-out rewards of all runs, seconds by phase, curves.png, three questions with the answers before and after
#
# TASK   sums (additions up to 60, short answers) or lists (lists of 20 lines to be edited: answers of a hundred tokens)
# RUNS   any of dta, dense (no sharing), treepo, das (default: dta dense)
# STEPS  of GRPO (default: 120)
# WARMUP_STEPS of supervised training (default: 60)
# SEED   of weights, order of problems and sampling (default: 1)
# OUT    where results go (default: runs/real_model/$TASK-$SEED); earlier results of this script in it are replaced
# MODEL  the model's folder (default: models/SmolLM2-135M-Instruct)
# PYTHON the interpreter (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} task=${TASK:-sums} runs=${RUNS:-dta dense} steps=${STEPS:-120} seed=${SEED:-1}
out=${OUT:-runs/real_model/$task-$seed} model=${MODEL:-models/SmolLM2-135M-Instruct} warmup=${WARMUP_STEPS:-60}
started=$SECONDS
mkdir -p "$out"

echo "== 1. the model"
"$python" examples/real_model/smollm2.py "$model"
common=(--bf16 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$model" --apply-chat-template
  --max-position-embeddings 512 --seed "$seed")

echo "== 2. the task: $task"
start=$model
case $task in
sums)
  "$python" examples/real_model/sums.py --output "$out/data" --max-operand 60 --held-out "${HELD_OUT:-256}" --seed "$seed"
  sampling=(--rollout-batch-size "${PROMPTS:-64}" --n-samples-per-prompt 16 --rollout-max-response-len 32)
  rates=(--lr 1e-5)
  segment=16
  ;;
lists)
  "$python" examples/real_model/lists.py --output "$out/data" --held-out "${HELD_OUT:-128}" --seed "$seed" \
    --warmup $((32 * warmup))
  rm -rf "$out/warmup" "$out/warmup-hf"
  "$python" -m megatron_dta.train "${common[@]}" --load-hf "$model" --objective sft --rollouts "$out/data/warmup.jsonl" \
    --global-batch-size 32 --train-iters "$warmup" --lr 5e-5 --lr-warmup-iters $((warmup / 12)) --save "$out/warmup" \
    --save-hf "$out/warmup-hf" --log-interval 20
  start=$out/warmup-hf
  sampling=(--rollout-batch-size "${PROMPTS:-32}" --n-samples-per-prompt 16 --rollout-max-response-len 160)
  rates=(--lr 1e-5)
  segment=32
  ;;
*)
  echo "error: TASK=$task is unknown; give sums or lists" >&2
  exit 2
  ;;
esac

echo "== 3. GRPO: $steps steps"
for run in $runs; do
  case $run in
  dta | dense) method=(--tree-mode "$run") ;;
  treepo) method=(--rollout-method treepo --treepo-segment-length $segment) ;;
  das) method=(--rollout-speculation das) ;;
  *)
    echo "error: RUNS contains $run; give any of dta, dense, treepo, das" >&2
    exit 2
    ;;
  esac
  echo "-- $run"
  rm -rf "$out/$run" "$out/$run-hf"
  "$python" -m megatron_dta.train "${common[@]}" --load-hf "$start" "${sampling[@]}" "${rates[@]}" "${method[@]}" \
    --prompt-data "$out/data/prompts.jsonl" --eval-prompt-data "$out/data/held_out.jsonl" \
    --eval-interval $((steps > 6 ? steps / 6 : 1)) --reward-function "examples/real_model/$task.py:reward" \
    --train-iters "$steps" --lr-warmup-iters $((steps / 24)) --save "$out/$run" --save-hf "$out/$run-hf" --log-interval 20 \
    --save-rollouts-interval "$steps"
done

echo "== 4. what it showed"
"$python" tools/report_run.py "$out/${runs%% *}" --prompts 2 --output "$out/report.html"
# shellcheck disable=SC2086
"$python" examples/real_model/report.py "$out" $runs --start "$start" --questions "$out/data/held_out.jsonl"
echo "it took $((SECONDS - started)) seconds"
