"""Imports Megatron quietly in the process from which training runs are forked."""

from megatron_dta.train import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

import megatron_dta.training.monitor.plot
import megatron_dta.training.setup  # noqa: F401
