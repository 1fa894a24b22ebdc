"""Runs ``megatron-dta fit-cost-model`` from a checkout."""

from megatron_dta.commands.fit_cost_model import main
from megatron_dta.common.errors import run_entry_point

if __name__ == "__main__":
    run_entry_point(main)
