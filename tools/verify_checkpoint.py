"""Runs ``megatron-dta verify-checkpoint`` from a checkout."""

from megatron_dta.commands.verify_checkpoint import main
from megatron_dta.common.entry_point import run_entry_point

if __name__ == "__main__":
    run_entry_point(main)
