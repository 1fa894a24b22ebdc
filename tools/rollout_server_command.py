"""Runs ``megatron-dta rollout-server-command`` from a checkout."""

from megatron_dta.commands.rollout_server_command import main
from megatron_dta.common.entry_point import run_entry_point

if __name__ == "__main__":
    run_entry_point(main)
