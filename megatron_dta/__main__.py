"""``python -m megatron_dta COMMAND``, the same as ``megatron-dta COMMAND``; ``torchrun -m megatron_dta`` starts it so."""

from megatron_dta.cli import run

if __name__ == "__main__":
    run()
