"""Cases and helpers that tests of checkpoint mesh share."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from checkpoint_worker import (
    MODEL,
)
from megatron_dta.config import ParallelConfig
from megatron_dta.model import initialize_parallel
from megatron_dta.training.checkpoint.files import find_checkpoint

ONE = ParallelConfig()


TP2 = ParallelConfig(tensor_model_parallel_size=2)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, without the rows that pad the vocabulary."""
    initialize_parallel(0)
    state = dist_checkpointing.serialization.load_plain_tensors(str(find_checkpoint(folder)))
    tensors = {key: values for key, values in state.items() if isinstance(values, torch.Tensor)}
    return {key: values[: MODEL.vocab_size] if "word_embeddings" in key else values for key, values in tensors.items()}


def assert_same_tensors(left: Path, right: Path) -> None:
    found, expected = tensors_of(left), tensors_of(right)
    assert found.keys() == expected.keys()
    assert any(key.startswith("optimizer.") and "exp_avg_sq" in key for key in found)
    for key, values in found.items():
        assert torch.equal(values, expected[key]), key
