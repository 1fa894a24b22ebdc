"""Bytes of an element and of a parameter's optimizer states, and the number of logits that exist at once."""

from __future__ import annotations

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Default number of logits alive at once; each such chunk reads and writes the whole gradient of the output weight.
LOGIT_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 22}


def optimizer_bytes(weight_bytes: int, main_params: str, exp_avg: str, exp_avg_sq: str) -> int:
    """Bytes of Adam's moments and the master weight of a parameter; weights of 32 bits or more are their own masters,
    with moments of their dtype.
    """
    if weight_bytes >= 4:
        return 2 * weight_bytes
    return DTYPE_BYTES[main_params] + DTYPE_BYTES[exp_avg] + DTYPE_BYTES[exp_avg_sq]
