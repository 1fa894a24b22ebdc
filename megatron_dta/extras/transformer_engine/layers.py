"""Replaces Megatron's linear layers by Transformer Engine's, with the same parameters, and with products in FP8.

Norms and linear layers stay separate modules, so our fused norms and the tree attention work between them. Names and
shapes of weights are those of the local layers, so checkpoints and conversions are the same. If a weight has a gradient
buffer (created by Megatron's distributed data parallelism), Transformer Engine adds the gradient to it in float32 as it
computes it, unless this is turned off (``no_gradient_accumulation_fusion``).

The order of passes differs from Megatron's use of these layers. Megatron tells the layers which microbatch is the first
one of a step: its forward quantizes the weights for the later ones, and its backward overwrites the gradient buffer, to
which later ones add. Here the segment that runs its forward first is the last to run its backward, so overwriting would
lose the gradients of all other segments. Therefore no pass is marked as the first one, and the engine declares for
which passes the weights are constant (``weights_quantized_once``).

FP8 scales that depend on earlier passes ("delayed") are not offered, because a recomputed forward
would not repeat the first one. With one scale for each block of 128 values of a row, a token's forward depends on its
row alone, as in bfloat16, and not on the segment that contains the row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_dta.core.model.experts.spec import feed_forward_submodules


def use_transformer_engine(
    spec: TransformerBlockSubmodules, into_main_grad: bool = True, rereads_input: bool = False
) -> None:
    """Put Transformer Engine's linear layers into the spec of a block without experts.

    Args:
        into_main_grad: whether the layers add weight gradients to the buffers; otherwise autograd does.
        rereads_input: whether a layer's input is available in its backward, so that an FP8 copy need not be kept.
    """
    # Imported here because the package is needed only when it is selected (``check_transformer_impl``).
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    column = _for_trees(TEColumnParallelLinear, into_main_grad, rereads_input)
    row = _for_trees(TERowParallelLinear, into_main_grad, rereads_input)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = column, row
        feed_forward = feed_forward_submodules(layer.submodules.mlp)
        feed_forward.linear_fc1, feed_forward.linear_fc2 = column, row


class TreeTELinear:
    """Mixin that adapts a linear layer of Transformer Engine to trees; it precedes the layer's class.

    Attributes:
        into_main_grad, rereads_input: see ``use_transformer_engine``.
        weight_is_constant: whether passes may share one quantized copy of the weight, see ``weights_quantized_once``.
    """

    into_main_grad = True
    rereads_input = False
    weight_is_constant = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_original_input = self.rereads_input
        # State dictionaries may omit the extra state, which is empty, as with Megatron's local layers.
        self.register_load_state_dict_pre_hook(
            lambda _, state, prefix, *__: state.setdefault(prefix + "_extra_state", None)
        )

    def get_extra_state(self) -> None:
        """None, because no scale outlives a pass; checkpoints then equal those of Megatron's local layers."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the FP8 state that another program stored."""

    def forward(self, x: Tensor) -> Any:
        """The output, and a bias that the caller adds or None, as in Megatron's layer."""
        self.fuse_wgrad_accumulation = self.into_main_grad and hasattr(self.weight, "main_grad")
        # A copy made without gradients lacks the transpose that a backward needs, so it is not shared.
        shares = self.weight_is_constant and (torch.is_grad_enabled() or bool(self._fp8_workspaces))
        # If this is set, Megatron passes None on; otherwise it passes on whether the pass is the first one.
        self.disable_parameter_transpose_cache, self.is_first_microbatch = not shares, False
        return super().forward(x)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the weight's FP8 copy and of its transpose, within a step in FP8."""
        return 2 * self.weight.numel() if self.config.fp8 else 0

    def forget_quantized_weight(self) -> None:
        """Free the copy; the next pass quantizes the weight again."""
        self._fp8_workspaces.clear()


@functools.cache
def _for_trees(layer: type, into_main_grad: bool, rereads_input: bool) -> type:
    attributes = {"into_main_grad": into_main_grad, "rereads_input": rereads_input, "__doc__": layer.__doc__}
    return type(layer.__name__, (TreeTELinear, layer), attributes)


@contextmanager
def weights_quantized_once(model_chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Context in which no weight changes: passes with gradients share one FP8 copy of each weight of the chunks."""
    layers = [module for chunk in model_chunks for module in chunk.modules() if isinstance(module, TreeTELinear)]
    for layer in layers:
        layer.weight_is_constant = True
    try:
        yield
    finally:
        for layer in layers:
            layer.weight_is_constant = False
            layer.forget_quantized_weight()
