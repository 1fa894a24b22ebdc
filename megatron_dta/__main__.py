"""``python -m megatron_dta COMMAND`` is ``megatron-dta COMMAND``; ``torchrun`` starts it as a module."""

from megatron_dta.cli import run

if __name__ == "__main__":
    run()
