#!/usr/bin/env bash
# Submits a job of megatron_dta to Slurm, and shows the command first.
#
#   slurm/submit.sh [--dry-run] [--env FILE] JOB [sbatch options] -- [arguments of the job's program]
#
# JOB is train, train_with_servers, evaluate, sweep, convert_hf_to_megatron or convert_megatron_to_hf. Options before "--" go to sbatch and
# overrule what the job script says (--nodes, --time, --partition, --account, --gpus-per-node, ...). FILE sets the
# environment, see environment.example.sh; without it the settings of the calling shell are used.
#
#   --dry-run  show the command and do nothing
set -euo pipefail

usage() {
    sed -n '2,/^set /p' "$0" | sed -e '$d' -e 's/^# \{0,1\}//'
    exit "${1:-2}"
}

fail() {
    echo "submit.sh: $1" >&2
    exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dry_run=0 environment=""
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=1 ;;
        --env)
            [ $# -gt 1 ] || fail "--env needs a file"
            environment=$2
            shift
            ;;
        --help | -h) usage 0 ;;
        -*) fail "$1: options for sbatch come after the name of the job; --help shows how" ;;
        *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || usage
job=$1
shift
script=$here/$job.sbatch
[ -f "$script" ] || fail "there is no job '$job'; the jobs are $(cd "$here" && echo ./*.sbatch | sed 's/\.\/\|\.sbatch//g')"
if [ -n "$environment" ]; then
    [ -f "$environment" ] || fail "--env $environment: there is no such file"
    environment=$(cd "$(dirname "$environment")" && pwd)/$(basename "$environment")
fi

options=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    options+=("$1")
    shift
done
[ $# -eq 0 ] || shift

logs=${DTA_LOG_DIR:-$PWD/slurm-logs}
command=(
    env "DTA_SLURM_DIR=$here" "DTA_ENVIRONMENT=$environment" "DTA_LOG_DIR=$logs"
    sbatch --export=ALL "--output=$logs/%x-%j.log" ${options[@]+"${options[@]}"} "$script" "$@"
)
printf '%q ' "${command[@]}"
echo
[ "$dry_run" = 0 ] || exit 0
command -v sbatch > /dev/null || fail "sbatch is not there; run this on a login node of the cluster"
mkdir -p "$logs"
exec "${command[@]}"
