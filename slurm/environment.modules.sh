# Example of a site file for environment modules or Lmod: copy, change, and give it to submit.sh with --env. environment.example.sh has
# all settings. A command in it that fails ends the job.
# shellcheck shell=bash disable=SC2034

# Jobs do not read the files of a login shell: the command "module" is defined here. Lmod: /etc/profile.d/lmod.sh
# shellcheck source=/dev/null
source /etc/profile.d/modules.sh
module purge
module load python/3.11 cuda/12.8

DTA_PYTHON=/shared/environments/megatron_dta/bin/python
