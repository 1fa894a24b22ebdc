"""One module for each console command; `megatron-dta COMMAND` and `tools/COMMAND.py` run them."""
