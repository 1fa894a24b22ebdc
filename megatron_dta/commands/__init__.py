"""Console commands, one module each; `megatron-dta COMMAND` and `tools/COMMAND.py` run them."""

from megatron_dta.common.quiet import quieten_libraries
from megatron_dta.wiring.attach import attach_extras

quieten_libraries()  # before a command imports Megatron, which warns of missing packages
attach_extras()
