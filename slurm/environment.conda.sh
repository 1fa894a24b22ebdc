# Example of a site file for conda (or mamba): copy, change, and give it to submit.sh with --env. environment.example.sh has all
# settings. A command in it that fails ends the job.
# shellcheck shell=bash disable=SC2034

# Jobs do not read ~/.bashrc, where "conda init" defines the command: it is defined here, from a folder that all nodes see.
# shellcheck source=/dev/null
source /shared/miniforge3/etc/profile.d/conda.sh
conda activate megatron_dta

# The interpreter of the environment, by its path: other nodes may find another "python" first.
DTA_PYTHON=$CONDA_PREFIX/bin/python
