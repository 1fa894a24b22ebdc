"""Runs ``megatron-dta teacher`` from a checkout."""

from megatron_dta.commands.teacher import main
from megatron_dta.common.errors import run_entry_point

if __name__ == "__main__":
    run_entry_point(main)
