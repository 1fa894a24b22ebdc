"""The gated delta net layer of Qwen3-Next and Qwen3.5, with Megatron's parameters (arXiv:2412.06464).

Megatron-Core's own module passes no states and needs a GPU to be built. Of it, the names and the layout of parameters
and checkpoints are kept:

    in_proj    queries and keys of the key heads, values and output gates z of the value heads, beta, alpha
    conv1d     one filter for each channel of queries, keys and values
    A_log, dt_bias   decay of each value head: g = -exp(A_log) softplus(alpha + dt_bias)
    out_norm   RMSNorm of each head's output, before the gate silu(z)
    out_proj

Legend: n rows of this rank, N tokens, J value heads, V size of a value head.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor

from dta_kernels.recurrence.gated_delta_rule import gated_delta_rule
from dta_kernels.tree_attention.reference import accumulation_dtype
from megatron_dta.core.model.hybrid.path_states import PathStates
from megatron_dta.core.model.hybrid.recurrent_layer import RecurrentLayer, spec_of, use_recurrence


class GatedDeltaNet(RecurrentLayer):
    """Takes the place of ``SelfAttention`` in a layer."""

    recurrence = staticmethod(gated_delta_rule)

    def recur(
        self, kinds: tuple[Tensor, ...], of_heads: list[Tensor], vectors: list[Tensor], paths: PathStates
    ) -> Tensor:
        (q, k, v), (beta, alpha), (bias, decay) = kinds, of_heads, vectors
        key_size, value_size = self.sizes.head_state
        q, k = (part.unflatten(1, (-1, key_size)) for part in (q, k))
        v = v.unflatten(1, (-1, value_size))
        dtype = accumulation_dtype(v.dtype)
        g = -decay.to(dtype).exp() * F.softplus(alpha.to(dtype) + bias.to(dtype))
        return paths.recur(self.layer_number, self.recurrence, (q, k, v, g, beta.sigmoid()))

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each head [n, J, V], times ``silu(gate)``."""
        # Every rank normalizes its own heads with the same weight, so its gradient is summed over the ranks.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm.weight)
        if self.fuses_norm:
            # Imported here because the reference does not need Triton.
            from dta_kernels.recurrence.head_norms import gated_norm

            return gated_norm(out, gate, weight, self.out_norm.eps)
        # The norm divides small outputs, so rounding to float32 on the way would show in the gradients.
        dtype = torch.float64 if out.dtype == torch.float32 else accumulation_dtype(out.dtype)
        x = out.to(dtype)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.out_norm.eps)
        return (normed * weight.to(dtype) * F.silu(gate.to(dtype))).to(out.dtype)


spec = partial(spec_of, GatedDeltaNet)
use_kernels = partial(use_recurrence, name="gated_delta_rule")
