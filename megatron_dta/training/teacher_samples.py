"""What a teacher computes for samples, in this process, and the samples and results as messages to a teacher elsewhere.

request   token_ids int32 [all tokens], lengths int64 [samples], loss_mask bool [all tokens]
logprobs  float32 or float64 [P], of the trained tokens in order
rows      row int64 [P], the row of each trained token; states [R, D], hidden states of the rows as bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_dta.config import TreeConfig
from megatron_dta.engine import TreeBatch, TreeEngine, prepare_batch
from megatron_dta.planning.step.sample import TrainingSample

_TORCH_DTYPES = {"torch.float32": torch.float32, "torch.float64": torch.float64, "torch.bfloat16": torch.bfloat16}


def teacher_batch(engine: TreeEngine, samples: Sequence[TrainingSample], tree: TreeConfig) -> TreeBatch:
    """The plan of a teacher for ``samples``; ranks that share a model must all call this."""
    plain = [TrainingSample(sample.token_ids, sample.loss_mask) for sample in samples]
    return prepare_batch(plain, replace(tree, tree_memory_gib=None), pipeline=engine.pipeline(tree.tree_segment_tokens))


def rows_of_pairs(batch: TreeBatch) -> np.ndarray:
    """int64 [P]: the row of each (sample, trained token), in the order of the samples."""
    return batch.plan.edge_row[batch.plan.pair_edge].astype(np.int64)


def pack_samples(samples: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
    """The arrays of a request."""
    return {
        "token_ids": np.concatenate([sample.token_ids for sample in samples]).astype(np.int32),
        "lengths": np.array([len(sample.token_ids) for sample in samples], np.int64),
        "loss_mask": np.concatenate([sample.loss_mask for sample in samples]).astype(bool),
    }


def unpack_samples(arrays: Mapping[str, np.ndarray], vocab_size: int, longest: int) -> list[TrainingSample]:
    """The samples of a request; ``ValueError`` says what is wrong."""
    kinds = {"token_ids": np.int32, "lengths": np.int64, "loss_mask": np.bool_}
    for name, kind in kinds.items():
        if name not in arrays or arrays[name].dtype != kind or arrays[name].ndim != 1:
            raise ValueError(f"{name}: must be an array [..] of {np.dtype(kind)}")
    tokens, lengths, mask = (arrays[name] for name in kinds)
    if not len(lengths) or lengths.min() < 1 or lengths.max() > longest or lengths.sum() != len(tokens):
        raise ValueError(f"lengths: must be 1 to {longest} and add up to the {len(tokens)} tokens")
    if len(mask) != len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"token_ids: must be in [0, {vocab_size}), and loss_mask as long")
    cuts = np.cumsum(lengths)[:-1]
    found = []
    for own, own_mask in zip(np.split(tokens, cuts), np.split(mask, cuts), strict=True):
        if own_mask[0] or not own_mask.any():
            raise ValueError("loss_mask: must be false at the first token of a sample and true at another one")
        found.append(TrainingSample(own.copy(), own_mask.copy()))
    return found


def tensor_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """A matrix as bytes, uint8 [rows, bytes], and the name of its dtype."""
    whole = tensor.detach().cpu().contiguous()
    width = whole.shape[1] * whole.element_size()
    return whole.view(torch.uint8).numpy().reshape(len(whole), width), str(whole.dtype)


def tensor_of(values: np.ndarray, dtype: str) -> torch.Tensor:
    """The matrix that ``tensor_bytes`` gave; ``ValueError`` if it is none."""
    if dtype not in _TORCH_DTYPES or values.dtype != np.uint8 or values.ndim != 2:
        raise ValueError("the message has no matrix of floats")
    return torch.from_numpy(values.copy()).view(_TORCH_DTYPES[dtype])
