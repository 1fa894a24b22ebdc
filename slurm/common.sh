# Functions of the job scripts; read by bash, on the first node of a job.
# shellcheck shell=bash

# Read the site's settings and fill in the rest.
read_settings() {
    # shellcheck source=/dev/null
    [ -z "${DTA_ENVIRONMENT:-}" ] || source "$DTA_ENVIRONMENT"
    : "${DTA_SLURM_DIR:?submit this job with submit.sh}"
    DTA_PYTHON=${DTA_PYTHON:-python3} DTA_LAUNCHER=${DTA_LAUNCHER:-task} DTA_MAX_RESTARTS=${DTA_MAX_RESTARTS:-10}
    if [ -z "${DTA_PROCESSES_PER_NODE:-}" ]; then
        DTA_PROCESSES_PER_NODE=${SLURM_GPUS_ON_NODE:-1}
    fi
    case $DTA_LAUNCHER in
        task | torchrun) ;;
        *) stop "DTA_LAUNCHER is '$DTA_LAUNCHER'; it must be task or torchrun" ;;
    esac
    export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    local root
    root=$(dirname "$DTA_SLURM_DIR")
    export PYTHONPATH=$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}
    container=()
    if [ -n "${DTA_CONTAINER_IMAGE:-}" ]; then
        container=("--container-image=$DTA_CONTAINER_IMAGE")
        [ -z "${DTA_CONTAINER_MOUNTS:-}" ] || container+=("--container-mounts=$DTA_CONTAINER_MOUNTS")
    fi
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

# Run a Python module on all nodes of the job, a process for each GPU, in the background; sets step_process.
#   start_step NODES [srun options] -- MODULE [arguments]
start_step() {
    local nodes=$1 logs options=()
    shift
    while [ "$1" != "--" ]; do
        options+=("$1")
        shift
    done
    shift
    logs=$DTA_LOG_DIR/${SLURM_JOB_NAME}-${SLURM_JOB_ID}
    mkdir -p "$logs"
    # A process that ends takes the others with it a minute later: time to say why, and to end by themselves.
    options+=(--wait=60 "${container[@]}" "--nodes=$nodes")
    local cpus=${SLURM_CPUS_ON_NODE:-1}
    [ "$cpus" -ge "$DTA_PROCESSES_PER_NODE" ] || stop "the job has $cpus CPUs on a node for $DTA_PROCESSES_PER_NODE \
processes; submit it with --exclusive, or with --ntasks-per-node $DTA_PROCESSES_PER_NODE --cpus-per-task N"
    if [ "$DTA_LAUNCHER" = task ]; then
        options+=("--cpus-per-task=$((cpus / DTA_PROCESSES_PER_NODE))")
        # shellcheck disable=SC2016 # the variables are those of each task
        srun "${options[@]}" "--ntasks=$((nodes * DTA_PROCESSES_PER_NODE))" \
            "--ntasks-per-node=$DTA_PROCESSES_PER_NODE" --label \
            bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
                log=$1/rank-$RANK.log; shift; "$@" > >(tee -a "$log") 2>&1; code=$?; wait; exit $code' \
            task "$logs" "$DTA_PYTHON" -m "$@" &
    else
        # shellcheck disable=SC2016
        srun "${options[@]}" "--ntasks=$nodes" --ntasks-per-node=1 "--cpus-per-task=$cpus" --label \
            bash -c 'python=$1 processes=$2 logs=$3; shift 3
                exec "$python" -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
                    --nproc-per-node "$processes" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
                    --log-dir "$logs" --tee 3 -m "$@"' \
            task "$DTA_PYTHON" "$DTA_PROCESSES_PER_NODE" "$logs" "$@" &
    fi
    step_process=$!
}

# Run a tool of the project on this node, and put the job into the queue again unless it ended well or its input was wrong.
run_tool() {
    local tool=$1
    shift
    srun --ntasks=1 --nodes=1 "${container[@]}" "$DTA_PYTHON" "$(dirname "$DTA_SLURM_DIR")/tools/$tool" "$@" &
    step_process=$!
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
}

pass_on_warning() {
    scancel --signal=TERM "$SLURM_JOB_ID.${step:-0}" || kill -TERM "$step_process"
}

# End the job, or put it into the queue again; 2 is wrong input, which another start would not mend.
finish() {
    if [ "$step_status" = 2 ]; then
        stop "ended with wrong input or settings; see the lines above"
    elif [ "$warned" = 1 ]; then
        say "was warned before its time limit or preemption; put into the queue again"
        requeue
    elif [ "$step_status" = 0 ]; then
        say "finished"
    elif [ "${SLURM_RESTART_COUNT:-0}" -lt "$DTA_MAX_RESTARTS" ]; then
        say "failed with status $step_status (a process died or hung, see the logs of the ranks); put into the queue again"
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
