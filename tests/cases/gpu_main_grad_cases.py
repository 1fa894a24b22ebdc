"""Cases and helpers that tests of gpu main grad share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from main_grad_cases import (
    test_bfloat16_weights_lose_nothing_between_segments,  # noqa: F401  runs here too
)


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
