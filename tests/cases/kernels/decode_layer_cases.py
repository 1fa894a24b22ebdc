"""Models of several shapes with fused layers, and decoding passes over a few prompts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from conftest import seed_all
from dta_kernels.paged_attention import launch
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.decode.paged_context import HeadShape, PagedContext, paged_context
from megatron_dta.sampling.in_process.cache_size import head_shape
from sampling_cases import SHAPES, VOCAB, make_model

PAGE = 4
GROUPED = SHAPES["grouped queries, QK-norm, untied"]
MODELS = {
    "QK-norm": (torch.float32, GROUPED),
    "float16": (torch.float16, GROUPED | dict(disable_bias_linear=True)),
    "biases": (torch.float32, dict(disable_bias_linear=False, add_qkv_bias=True)),
    "one layer": (torch.float32, GROUPED | dict(num_layers=1, disable_bias_linear=True)),
}


@contextmanager
def small_parts() -> Iterator[None]:
    """Two parts of 16 keys, which one program computes where there are many tiles: the interpreter takes its time for
    programs without work, too.
    """
    config = HeadShape.config

    def small(shape: HeadShape, run: int, tiles: int = 1):
        settings = config(shape, run, tiles)
        return replace(settings, parts=min(settings.parts, 2), keys=16, min_part=16)

    with mock.patch.object(HeadShape, "config", small), mock.patch.object(launch, "_PROGRAMS", 32):
        yield


@pytest.fixture(autouse=True)
def few_parts() -> Iterator[None]:
    with small_parts():
        yield


def fused_model(name: str, **changes: Any) -> Any:
    dtype, shape = MODELS[name]
    settings = dict(fused_layer_impl="triton", normalization="RMSNorm", kv_channels=16)
    model = make_model(5, changes.pop("params_dtype", dtype), **settings | shape | changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # biases are zeros, and norms ones
    return model


def passes(
    model: Any, again: Callable[[torch.Tensor, PagedContext], torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], list[PagedContext]]:
    """Hidden states of a pass over three prompts, of one with the next token of each, and of that one once more.

    again: runs the last one, in place of the model. The pages exist only until this returns.
    """
    rng = seed_all(9)
    shape = head_shape(model)
    device = next(model.parameters()).device
    cache = PagedCache(model.attention_layers, PAGE, shape.num_groups, shape.sizes, shape.dtype, device)
    cache.grow(9)
    tables = [np.array([0, 4, 7]), np.array([1, 5, 8]), np.array([2, 3, 6])]
    outputs, contexts, starts = [], [], np.zeros(3, np.int64)
    for counts in (np.array([5, 1, 7]), np.array([1, 1, 1])):
        context, _ = paged_context(cache, starts, counts, tables, shape)
        tokens = torch.from_numpy(rng.integers(0, VOCAB, counts.sum())).to(device)
        with torch.no_grad():
            outputs.append(model(tokens[None], context))
        contexts.append(context)
        starts = starts + counts
    # As after an error inside a layer: what was left behind by the pass before belongs to nobody.
    context.carried = torch.full_like(outputs[-1].unsqueeze(1), float("nan"))
    with torch.no_grad():
        outputs.append((again or model)(tokens[None], context))
    assert torch.equal(outputs[-1], outputs[-2])
    return outputs, contexts
