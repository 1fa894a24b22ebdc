"""Runs ``megatron-dta convert-megatron-to-hf`` from a checkout."""

from megatron_dta.commands.convert_megatron_to_hf import main
from megatron_dta.common.entry_point import run_entry_point

if __name__ == "__main__":
    run_entry_point(main)
