"""Runs ``megatron-dta simulate-pipeline`` from a checkout."""

from megatron_dta.commands.simulate_pipeline import main
from megatron_dta.common.entry_point import run_entry_point

if __name__ == "__main__":
    run_entry_point(main)
