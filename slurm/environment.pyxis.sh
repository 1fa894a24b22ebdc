# Example of a site file for containers by pyxis and enroot: copy, change, and give it to submit.sh with --env. environment.example.sh
# has all settings. A command in it that fails ends the job.
# shellcheck shell=bash disable=SC2034

# A file, or what enroot imports, such as nvcr.io#nvidia/pytorch:25.09-py3. Import it once: enroot import --output FILE docker://IMAGE
DTA_CONTAINER_IMAGE=/shared/images/megatron_dta.sqsh
# Data, models and --save have to be in one of these. This repository, the logs and the folder that the job is submitted from are
# mounted by themselves, under the same paths, and relative paths begin in the latter.
DTA_CONTAINER_MOUNTS=/shared:/shared
# The interpreter inside.
DTA_PYTHON=python3

# Where the image holds a copy of this repository that is to be used:
# DTA_CONTAINER_REPOSITORY=/opt/megatron_dta
