#!/usr/bin/env bash
# A coding agent on SmolLM2-135M-Instruct learns by GRPO to repair small repositories, on a GPU in minutes.
#
#   bash examples/coding_agent.sh       # with the package installed with [gguf,servers]: PYTHON=.venv/bin/python, say
#
# The repositories, the agent and the sandbox are in examples/real_model/repairs.py.
#   1. the model, as a Hugging Face folder; the repositories
#   2. supervised training on sessions of a teacher who knows the commands and guesses the repairs
#   3. GRPO: the agent runs 8 times for each of 32 repositories a step, at the gateway inside training
#   4. held-out rewards, curves.png, tokens computed and in flattened rows, three sessions before and after, report.html
#
# STEPS  of GRPO (default: 120)
# WARMUP_STEPS of supervised training, 32 sessions each (default: 60)
# PROMPTS  repositories of a step, HELD_OUT of the evaluation, CONCURRENCY agents at once (defaults: 32, 256, 128)
# LR     of GRPO (default: 1e-5)
# CODE_UNCONFINED=1  where bubblewrap does not work, run programs with resource limits as the only barrier
# SEED   of weights, repositories and sampling (default: 1)
# OUT    where results go (default: runs/coding_agent-$SEED); earlier results of this script in it are replaced
# MODEL  the model's folder (default: models/SmolLM2-135M-Instruct)
# PYTHON the interpreter (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} steps=${STEPS:-120} warmup=${WARMUP_STEPS:-60} seed=${SEED:-1}
out=${OUT:-runs/coding_agent-$seed} model=${MODEL:-models/SmolLM2-135M-Instruct} prompts=${PROMPTS:-32}
common=(--bf16 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$model" --apply-chat-template
  --max-position-embeddings 512 --seed "$seed")
started=$SECONDS
mkdir -p "$out"
rm -rf "$out"/{warmup,warmup-hf,grpo,grpo-hf}

echo "== 1. the model and the repositories"
"$python" examples/real_model/smollm2.py "$model"
"$python" examples/real_model/repairs.py --output "$out/data" --prompts $((prompts * steps)) \
  --held-out "${HELD_OUT:-256}" --warmup $((32 * warmup)) --seed "$seed"

echo "== 2. supervised training: $warmup steps"
"$python" -m megatron_dta.train "${common[@]}" --load-hf "$model" --objective sft --rollouts "$out/data/warmup.jsonl" \
  --global-batch-size 32 --train-iters "$warmup" --lr 5e-5 --lr-warmup-iters $((warmup / 12)) --save "$out/warmup" \
  --save-hf "$out/warmup-hf" --log-interval 20

echo "== 3. GRPO with the agent: $steps steps"
"$python" -m megatron_dta.train "${common[@]}" --load-hf "$out/warmup-hf" \
  --prompt-data "$out/data/prompts.jsonl" --eval-prompt-data "$out/data/held_out.jsonl" \
  --eval-interval $((steps > 6 ? steps / 6 : 1)) --agent-callable examples/real_model/repairs.py:agent \
  --agent-concurrency "${CONCURRENCY:-128}" --agent-timeout 120 --rollout-batch-size "$prompts" --n-samples-per-prompt 8 \
  --rollout-max-response-len 24 --loss-aggregation trajectory-mean --lr "${LR:-1e-5}" --lr-warmup-iters $((steps / 24)) \
  --train-iters "$steps" --save "$out/grpo" --save-hf "$out/grpo-hf" --save-rollouts-interval "$steps" --log-interval 10

echo "== 4. what it showed"
"$python" tools/report_run.py "$out/grpo" --prompts 2 --output "$out/report.html"
"$python" examples/real_model/report.py "$out" grpo --start "$out/warmup-hf" --questions "$out/data/held_out.jsonl" \
  --sessions
echo "it took $((SECONDS - started)) seconds"
