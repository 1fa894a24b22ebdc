# Functions of the job scripts; read by bash, on the first node of a job.
# shellcheck shell=bash

# Read the site's settings and fill in the rest.
read_settings() {
    [ -z "${DTA_ENVIRONMENT:-}" ] || source_site "$DTA_ENVIRONMENT"
    : "${DTA_SLURM_DIR:?submit this job with submit.sh}"
    DTA_PYTHON=${DTA_PYTHON:-python3} DTA_LAUNCHER=${DTA_LAUNCHER:-task} DTA_MAX_RESTARTS=${DTA_MAX_RESTARTS:-10}
    DTA_EARLY_FAILURE_SECONDS=${DTA_EARLY_FAILURE_SECONDS:-60}
    if [ -z "${DTA_PROCESSES_PER_NODE:-}" ]; then
        DTA_PROCESSES_PER_NODE=${SLURM_GPUS_ON_NODE:-1}
    fi
    case $DTA_LAUNCHER in
        task | torchrun) ;;
        *) stop "DTA_LAUNCHER is '$DTA_LAUNCHER'; it must be task or torchrun" ;;
    esac
    export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    logs=$DTA_LOG_DIR/${SLURM_JOB_NAME}-${SLURM_JOB_ID}
    mkdir -p "$logs" || stop "the log folder $logs cannot be made; set DTA_LOG_DIR"
    repository=$(dirname "$DTA_SLURM_DIR") container=()
    if [ -n "${DTA_CONTAINER_IMAGE:-}" ]; then
        set_container
    else
        command -v "$DTA_PYTHON" > /dev/null || stop "DTA_PYTHON is '$DTA_PYTHON', which is not a program here; set it in the site file"
    fi
}

# Read a site file. Modules and conda use unset variables and pipelines whose parts fail, so both checks are off meanwhile. A command
# that fails in the file itself ends the job. Functions and files that it calls may fail inside; their status counts.
source_site() {
    set +u +o pipefail -E
    trap 'site_failed $? "$1" "$LINENO" "${FUNCNAME[0]} ${BASH_SOURCE[0]}"' ERR
    trap 'say "$1: ended the shell of the job (exit, or a failure after set -e)" >&2; exit 2' EXIT
    # shellcheck source=/dev/null
    source "$1"
    local status=$?
    trap - ERR EXIT
    set +eE -uo pipefail
    [ "$status" = 0 ] || stop "$1: ended with status $status; if nothing is wrong, add the line: true"
}

site_failed() {
    local hint="" command word
    [ "$4$BASH_SUBSHELL" = "source ${2}0" ] || return 0
    # Not $BASH_COMMAND, which may be the return of a function.
    command=$(sed -n "${3}s/^[[:space:]]*//p" "$2")
    word=${command%% *}
    if [ "$1" = 127 ] && [[ $word != *[=\$]* ]]; then
        hint="; there is no command '$word' in the shell of a job"
        case $word in
            module | ml) hint+=", source /etc/profile.d/modules.sh or lmod.sh before it" ;;
            conda | mamba) hint+=", source etc/profile.d/conda.sh of its installation before it" ;;
        esac
    fi
    trap - EXIT
    stop "$2, line $3: '$command' failed with status $1$hint (a command that may fail: add || true)"
}

# Options of srun for pyxis. The repository, the logs and the folder of the job have the same paths inside as outside.
set_container() {
    local mounts=${DTA_CONTAINER_MOUNTS:-} folder
    [ -n "${DTA_CONTAINER_REPOSITORY:-}" ] || mounts+=",$repository:$repository"
    for folder in "$DTA_LOG_DIR" "$PWD"; do
        mounts+=",$folder:$folder"
    done
    repository=${DTA_CONTAINER_REPOSITORY:-$repository}
    container=("--container-image=$DTA_CONTAINER_IMAGE" "--container-mounts=${mounts#,}"
        "--container-workdir=${DTA_CONTAINER_WORKDIR:-$PWD}")
}

say() {
    echo "$(date '+%F %T') job ${SLURM_JOB_ID:-?}, start $((${SLURM_RESTART_COUNT:-0} + 1)): $1"
}

stop() {
    say "$1" >&2
    exit 2
}

# Address of a node as Slurm knows it: its name need not be in the name service.
address_of() {
    scontrol show node "$1" | grep -o 'NodeAddr=[^ ]*' | head -n 1 | cut -d= -f2
}

# Where the processes of an allocation meet: its first node, and a port that follows from the job's number.
set_rendezvous() {
    local nodelist=$1 first
    first=$(scontrol show hostnames "$nodelist" | head -n 1)
    MASTER_ADDR=$(address_of "$first")
    MASTER_PORT=$((20000 + (${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} + ${SLURM_ARRAY_TASK_ID:-0}) % 12000))
    export MASTER_ADDR MASTER_PORT
}

# What every task runs first, in the container if there is one: it finds the project, and notes when the first task began.
# An image may have a PYTHONPATH of its own, which goes before that of the job.
# shellcheck disable=SC2016 # the variables are those of each task
prelude='export PYTHONPATH=$1:$1/kernels${PYTHONPATH:+:$PYTHONPATH}; logs=$2; shift 2
    if [ "$SLURM_PROCID" = 0 ]; then date +%s > "$logs/began"; fi
'

# Run a script in all tasks of a step, in the background; sets step_process. What srun itself says goes to srun.log, too.
#   launch [srun options] -- SCRIPT [arguments]
launch() {
    local options=()
    while [ "$1" != "--" ]; do
        options+=("$1")
        shift
    done
    local script=$prelude$2
    shift 2
    # An earlier start that began and counted nothing was ended by Slurm, with its node: the job can run.
    [ ! -f "$logs/began" ] || [ -f "$logs/early" ] || echo 0 > "$logs/early"
    rm -f "$logs/began" "$logs/srun.log"
    exec {messages}> >(trap '' TERM && exec tee "$logs/srun.log" >&2)
    messages_process=$!
    srun ${container[@]+"${container[@]}"} "${options[@]}" bash -c "$script" task "$repository" "$logs" "$@" 2>&"$messages" &
    step_process=$!
    exec {messages}>&-
}

# Run a Python module on all nodes of the job, a process for each GPU, in the background; sets step_process.
#   start_step NODES [srun options] -- MODULE [arguments]
start_step() {
    local nodes=$1 options=()
    shift
    while [ "$1" != "--" ]; do
        options+=("$1")
        shift
    done
    shift
    # A process that ends takes the others with it a minute later: time to say why, and to end by themselves.
    options+=(--wait=60 "--nodes=$nodes" --label)
    local cpus=${SLURM_CPUS_ON_NODE:-1}
    [ "$cpus" -ge "$DTA_PROCESSES_PER_NODE" ] || stop "the job has $cpus CPUs on a node for $DTA_PROCESSES_PER_NODE \
processes; submit it with --exclusive, or with --ntasks-per-node $DTA_PROCESSES_PER_NODE --cpus-per-task N"
    if [ "$DTA_LAUNCHER" = task ]; then
        # shellcheck disable=SC2016 # the variables are those of each task
        launch "${options[@]}" "--cpus-per-task=$((cpus / DTA_PROCESSES_PER_NODE))" \
            "--ntasks=$((nodes * DTA_PROCESSES_PER_NODE))" "--ntasks-per-node=$DTA_PROCESSES_PER_NODE" -- \
            'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
                # Slurm signals all processes of a step. Python saves; this shell and tee wait until it has ended.
                trap : TERM
                "$@" > >(trap "" TERM && exec tee -a "$logs/rank-$RANK.log") 2>&1; code=$?; wait; exit $code' \
            "$DTA_PYTHON" -m "$@"
    else
        # shellcheck disable=SC2016
        launch "${options[@]}" "--ntasks=$nodes" --ntasks-per-node=1 "--cpus-per-task=$cpus" -- \
            'python=$1 processes=$2; shift 2
                exec "$python" -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
                    --nproc-per-node "$processes" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
                    --log-dir "$logs" --tee 3 -m "$@"' \
            "$DTA_PYTHON" "$DTA_PROCESSES_PER_NODE" "$@"
    fi
}

# Run a tool of the project on this node, and put the job into the queue again unless it ended well or its input was wrong.
run_tool() {
    local tool=$1
    shift
    launch --ntasks=1 --nodes=1 -- 'exec "$@"' "$DTA_PYTHON" "$repository/tools/$tool" "$@"
    wait_for_step
    finish
}

# Wait for the step. Slurm's warning (SIGTERM, or SIGUSR1 with --signal B:USR1@300) is passed on to its processes, which save and end; sets step_status.
wait_for_step() {
    warned=0
    trap 'warned=1; say "got SIGTERM: the processes save and end"; pass_on_warning' TERM
    trap 'warned=1; say "got SIGUSR1: the processes save and end"; pass_on_warning' USR1
    step_status=0
    while true; do
        step_status=0
        wait "$step_process" || step_status=$?
        kill -0 "$step_process" 2> /dev/null || break
    done
    trap - TERM USR1
    wait "$messages_process" 2> /dev/null
    note_length
}

# Whether this start failed so early that the next one would, too. Where an earlier start of the job went well, three in a row are needed.
note_length() {
    local began
    early=0
    began=$(cat "$logs/began" 2> /dev/null) || began=""
    if [ -n "$began" ] && [ $(($(date +%s) - began)) -ge "$DTA_EARLY_FAILURE_SECONDS" ]; then
        echo 0 > "$logs/early"
    elif [ "$step_status" != 0 ] && [ "$warned" = 0 ]; then
        if [ -f "$logs/early" ]; then
            early=$(($(cat "$logs/early") + 1))
            echo "$early" > "$logs/early"
        else
            early=3
        fi
    fi
}

# The last lines that srun and the first rank have left, on one line.
last_words() {
    local text
    text=$(tail -n 3 "$logs/srun.log" | paste -sd '|' | sed 's/|/ | /g')
    if [ -f "$logs/began" ] && [ -s "$logs/rank-0.log" ]; then
        text+="${text:+ | }rank 0: $(tail -n 1 "$logs/rank-0.log")"
    fi
    echo "${text:-srun said nothing}"
}

pass_on_warning() {
    scancel --signal=TERM "$SLURM_JOB_ID.${step:-0}" || kill -TERM "$step_process"
}

# End the job, or put it into the queue again; 2 is wrong input, which another start would not mend.
finish() {
    if [ "$step_status" = 2 ]; then
        stop "ended with wrong input or settings; see the lines above"
    elif [ "$warned" = 1 ] && [ "$step_status" = 0 ]; then
        say "was warned before its time limit or preemption; put into the queue again"
        requeue
    elif [ "$step_status" = 0 ]; then
        say "finished"
    elif [ "$early" -ge 3 ]; then
        local when="within $DTA_EARLY_FAILURE_SECONDS seconds (DTA_EARLY_FAILURE_SECONDS)"
        [ -f "$logs/began" ] || when="before any process began"
        say "failed with status $step_status $when, which another start would not mend: $(last_words)"
        exit "$step_status"
    elif [ "${SLURM_RESTART_COUNT:-0}" -lt "$DTA_MAX_RESTARTS" ]; then
        local why="a process died or hung, see the logs of the ranks"
        [ "$warned" = 0 ] || why="it was warned before its time limit or preemption, and ended before it had saved"
        say "failed with status $step_status ($why); put into the queue again"
        requeue
    else
        say "failed with status $step_status after $DTA_MAX_RESTARTS restarts (DTA_MAX_RESTARTS)"
        exit "$step_status"
    fi
}

requeue() {
    # Slurm ends this script while it requeues the job.
    scontrol requeue "$SLURM_JOB_ID" || say "could not be put into the queue again; submit it once more"
}
