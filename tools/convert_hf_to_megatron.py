"""Runs ``megatron-dta convert-hf-to-megatron`` from a checkout."""

from megatron_dta.commands.convert_hf_to_megatron import main
from megatron_dta.common.entry_point import run_entry_point

if __name__ == "__main__":
    run_entry_point(main)
