#!/usr/bin/env bash
# An agent that calls tools through an unmodified client library learns by GRPO on the CPU, in minutes.
#
#   bash examples/tool_agent.sh         # with the package installed with [servers] and openai: PYTHON=.venv/bin/python, say
#
# The task and the agents are in examples/tool_agent.py.
#   1. supervised warm-up on the dialogues of a careless teacher
#   2. GRPO: the agent runs 8 times for each of 16 prompts a step, at the gateway inside training
#   3. report.html, with the trees of sessions
#
# AGENT  openai_agent (the package openai) or sdk_agent (the package openai-agents); default: openai_agent
# STEPS  of GRPO (default: 150)
# OUT    where results go (default: runs/tool_agent); earlier results of this script in it are replaced
# PYTHON the interpreter (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-runs/tool_agent} agent=${AGENT:-openai_agent} steps=${STEPS:-150}
model=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 256 --rotary-base 1000
  --vocab-size 96 --swiglu --disable-bias-linear --qk-layernorm --seed 1 --weight-decay 0 --adam-beta2 0.95
  --tree-segment-tokens 1024)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
started=$SECONDS
mkdir -p "$out"
rm -rf "$out/warmup" "$out/grpo"

echo "== 1. supervised warm-up"
"$python" examples/tool_agent.py --output "$out/data" --care 0.4 --count 8000
"$python" -m megatron_dta.train "${model[@]}" --objective sft --rollouts "$out/data/warmup.jsonl" --global-batch-size 64 \
  --train-iters "${WARMUP_STEPS:-500}" --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --save "$out/warmup" --log-interval 50

echo "== 2. GRPO with $agent: $steps steps"
"$python" -m megatron_dta.train "${model[@]}" --load "$out/warmup" --finetune \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/data/tokenizer" --apply-chat-template \
  --prompt-data "$out/data/prompts.jsonl" --eval-prompt-data "$out/data/held_out.jsonl" --eval-interval "$((steps / 5))" \
  --agent-callable "examples/tool_agent.py:$agent" --agent-timeout 60 --gateway-max-calls 8 \
  --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 8 --loss-aggregation trajectory-mean \
  --train-iters "$steps" --lr 4e-4 --lr-warmup-iters 4 --save "$out/grpo" --save-rollouts-interval "$((steps / 2))" --advantage-estimator dr_grpo \
  --log-interval 10

echo "== 3. the report"
"$python" tools/report_run.py "$out/grpo" --prompts 2 --output "$out/report.html"
echo "it took $((SECONDS - started)) seconds"
