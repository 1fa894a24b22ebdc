"""Transformer Engine's linear layers in the place of Megatron's, with the same parameters.

Norms and linear layers stay apart, so our fused norms and the tree attention work between them, and names and shapes of
weights are those of the local layers. Where a weight has a gradient buffer (Megatron's distributed data parallelism
gives it one), Transformer Engine adds the gradient to it in float32 as it computes it, unless that is turned off
(``--no-gradient-accumulation-fusion``).
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def use_transformer_engine(spec: TransformerBlockSubmodules, into_main_grad: bool = True) -> None:
    """Put Transformer Engine's linear layers into the spec of a block without experts.

    Args:
        into_main_grad: whether they add weights' gradients to the buffers; otherwise autograd does.
    """
    # Here and not above: it need not be installed (``check_transformer_impl``) where nothing asks for it.
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    column, row = TEColumnParallelLinear, TERowParallelLinear
    if into_main_grad:
        column, row = _into_main_grad(column), _into_main_grad(row)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = column, row
        feed_forward = _feed_forward_submodules(layer.submodules.mlp)
        feed_forward.linear_fc1, feed_forward.linear_fc2 = column, row


def _feed_forward_submodules(mlp: Any) -> MLPSubmodules:
    """Those of a layer's feed-forward part: a ``ModuleSpec`` in Megatron-Core 0.16, a partial in 0.19."""
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]


@functools.cache
def _into_main_grad(layer: type) -> type:
    """Transformer Engine's ``layer``, which adds to its weight's gradient buffer if there is one at the time."""

    class IntoMainGrad(layer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.fuse_wgrad_accumulation = hasattr(self.weight, "main_grad")
            return super().forward(*args, **kwargs)

    IntoMainGrad.__name__ = layer.__name__
    return IntoMainGrad
