# Settings of your site for the jobs in this folder: copy, change, and give it to submit.sh with --env.
# It is read by bash on the first node of a job, before anything is started; the processes inherit what it exports. A command in it that
# fails ends the job (one that may fail: add || true). Examples for one kind of site: environment.modules.sh, environment.conda.sh and
# environment.pyxis.sh.
# shellcheck shell=bash

# --- What runs the programs: an environment on a shared file system ...
# DTA_PYTHON=/shared/environments/megatron_dta/bin/python
# ... or a container (pyxis/enroot must be installed); DTA_PYTHON is then the interpreter inside.
# DTA_CONTAINER_IMAGE=/shared/images/megatron_dta.sqsh
# DTA_CONTAINER_MOUNTS=/shared:/shared
# Mounted without being named: this repository, the log folder, and the folder that the job is submitted from, where relative paths
# begin. Another folder to begin in, and a copy of this repository in the image to use instead:
# DTA_CONTAINER_WORKDIR=/shared/runs
# DTA_CONTAINER_REPOSITORY=/opt/megatron_dta

# --- How processes are started.
# task      one Slurm task for each GPU (or each process on CPUs): a SIGTERM reaches the processes themselves. The default.
# torchrun  one Slurm task for each node, which runs torchrun. torchrun kills its processes 30 seconds after a SIGTERM: choose
#           it only where a checkpoint is written faster than that.
# DTA_LAUNCHER=task
# Processes on a node: the GPUs that the job got on it; set it on nodes without GPUs.
# DTA_PROCESSES_PER_NODE=8

# --- A job that fails for another reason than wrong input is put into the queue again, at most this many times ...
# DTA_MAX_RESTARTS=10
# ... unless its processes ran for less than this: a wrong container or a missing package is not mended by another start. After a start
# that lasted longer, three in a row may be this short.
# DTA_EARLY_FAILURE_SECONDS=60

# --- Rollout servers of train_with_servers: the command that starts one on the nodes of its group, and its port.
# It is started again if it ends while the run trains. The job trains with --rollout-weight-transfer nccl, for which vLLM needs this:
# DTA_SERVER_COMMAND="VLLM_SERVER_DEV_MODE=1 vllm serve /shared/models/Qwen3-8B --port 8000 --tensor-parallel-size 8 \
#     --weight-transfer-config '{\"backend\": \"nccl\"}'"
# Or from the flags of the run, with its speculation:
# DTA_SERVER_COMMAND="python tools/rollout_server_command.py --exec --rollout-weight-transfer nccl @/shared/run.args \
#     --port 8000 -- --tensor-parallel-size 8"
# DTA_SERVER_PORT=8000
# Seconds until all of them have to answer.
# DTA_SERVER_TIMEOUT=1800

# --- Whatever the network needs.
# export NCCL_SOCKET_IFNAME=ib0
# export TRITON_CACHE_DIR=/tmp/triton-$USER
