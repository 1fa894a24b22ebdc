"""Transformer Engine's linear layers in the place of Megatron's, with the same parameters, and their products in FP8.

Norms and linear layers stay apart, so our fused norms and the tree attention work between them, and names and shapes of
weights are those of the local layers: checkpoints and conversions are the same. Where a weight has a gradient buffer
(Megatron's distributed data parallelism gives it one), Transformer Engine adds the gradient to it in float32 as it
computes it, unless that is turned off (``--no-gradient-accumulation-fusion``).

What differs from the use that Megatron makes of these layers is the order of the passes. There the first microbatch of
a step is told to the layers: its forward quantizes the weights, which later ones find quantized, and its backward
writes gradients over the buffer, where later ones add. Here the segment that runs forward first is the last to run
backward, and writing would lose the gradients of all others. So no pass is called the first one, and the engine says
for which passes the weights stay as they are (``weights_quantized_once``).

Scales of FP8 values that depend on earlier passes ("delayed") are refused in the configuration: a recomputed forward
would not repeat the first one. With scales per block of 128 values of a row a token's forward depends on its row alone,
as in bfloat16, and not on the segment that the row is in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor


def use_transformer_engine(
    spec: TransformerBlockSubmodules, into_main_grad: bool = True, rereads_input: bool = False
) -> None:
    """Put Transformer Engine's linear layers into the spec of a block without experts.

    Args:
        into_main_grad: whether they add weights' gradients to the buffers; otherwise autograd does.
        rereads_input: whether a layer's input is there again in its backward, so that an FP8 copy need not be kept.
    """
    # Here and not above: it need not be installed (``check_transformer_impl``) where nothing asks for it.
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    column = _for_trees(TEColumnParallelLinear, into_main_grad, rereads_input)
    row = _for_trees(TERowParallelLinear, into_main_grad, rereads_input)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = column, row
        feed_forward = _feed_forward_submodules(layer.submodules.mlp)
        feed_forward.linear_fc1, feed_forward.linear_fc2 = column, row


def _feed_forward_submodules(mlp: Any) -> MLPSubmodules:
    """Those of a layer's feed-forward part: a ``ModuleSpec`` in Megatron-Core 0.16, a partial in 0.19."""
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]


class TreeTELinear:
    """What a linear layer of Transformer Engine does otherwise in a tree; comes before its class.

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
        # State dictionaries need not name the extra state, which is empty; Megatron's local layers have this too.
        self.register_load_state_dict_pre_hook(
            lambda _, state, prefix, *__: state.setdefault(prefix + "_extra_state", None)
        )

    def get_extra_state(self) -> None:
        """Nothing: no scale outlives a pass. So checkpoints are those of Megatron's local layers."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore what another program has kept for its FP8 passes."""

    def forward(self, x: Tensor) -> Any:
        """As Megatron's layer: the output, and a bias that is added later or None."""
        self.fuse_wgrad_accumulation = self.into_main_grad and hasattr(self.weight, "main_grad")
        # A copy made without gradients lacks the transpose that a backward needs, so it is not shared.
        shares = self.weight_is_constant and (torch.is_grad_enabled() or bool(self._fp8_workspaces))
        # Megatron passes None on where this is set, and otherwise whether the pass is the first one.
        self.disable_parameter_transpose_cache, self.is_first_microbatch = not shares, False
        return super().forward(x)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the weight's copy in FP8 and of its transpose, within a step in FP8."""
        return 2 * self.weight.numel() if self.config.fp8 else 0

    def forget_quantized_weight(self) -> None:
        """Free the copy; the next pass makes one of the weight as it is then."""
        self._fp8_workspaces.clear()


@functools.cache
def _for_trees(layer: type, into_main_grad: bool, rereads_input: bool) -> type:
    attributes = {"into_main_grad": into_main_grad, "rereads_input": rereads_input, "__doc__": layer.__doc__}
    return type(layer.__name__, (TreeTELinear, layer), attributes)


@contextmanager
def weights_quantized_once(parts: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within, the weights of a model's ``parts`` do not change: passes with gradients share one copy of each in FP8."""
    layers = [module for part in parts for module in part.modules() if isinstance(module, TreeTELinear)]
    for layer in layers:
        layer.weight_is_constant = True
    try:
        yield
    finally:
        for layer in layers:
            layer.weight_is_constant = False
            layer.forget_quantized_weight()
