"""Checks exactness: compares tree training with two references that run one sequence at a time.

The references are the stock Megatron model in float64, with its own attention and a plain log-softmax, and Hugging Face
transformers in float32 with the same weights. ``megatron-dta check-parity`` and the test suite use this package.
"""

from megatron_dta.extras.parity.cases import random_training_samples
from megatron_dta.extras.parity.compare import ParityErrors, compare_outcomes
from megatron_dta.extras.parity.outcome import Outcome
from megatron_dta.extras.parity.references import run_stock
from megatron_dta.extras.parity.tree_run import run_tree

__all__ = ["Outcome", "ParityErrors", "compare_outcomes", "random_training_samples", "run_stock", "run_tree"]
