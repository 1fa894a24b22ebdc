"""Console commands, one module each; `megatron-dta COMMAND` and `tools/COMMAND.py` run them."""
