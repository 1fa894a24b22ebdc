"""The gated delta net layer of Qwen3-Next and Qwen3.5, with Megatron's parameters (arXiv:2412.06464).

Megatron-Core's own module passes no states and needs a GPU to be built. Of it, the names and the layout of parameters
and checkpoints are kept:

    in_proj    queries and keys of the key heads, values and output gates z of the value heads, beta, alpha
    conv1d     one filter for each channel of queries, keys and values
    A_log, dt_bias   decay of each value head: g = -exp(A_log) softplus(alpha + dt_bias)
    out_norm   RMSNorm of each head's output, before the gate silu(z)
    out_proj

Tensor parallelism divides the heads: every rank has its key heads with their value heads, and its part of each section
of ``in_proj``. Context parallelism divides the rows of a pass outside the recurrence and these heads inside it
(``parallel.context_group``): a rank convolves all tokens of its heads, and keeps their states. The norm and the gate of
the output, which need no other token, are computed on rows.

Legend: n rows of this rank, N tokens, H key heads, J value heads, K and V sizes of their heads; H and J are those of
this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from dta_kernels.recurrence.contract import Recurrence
from dta_kernels.recurrence.gated_delta_rule import gated_delta_rule
from dta_kernels.tree_attention.reference import accumulation_dtype
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.attention.context import AttentionContext, check_context
from megatron_dta.core.model.hybrid.path_states import PathStates, RecurrentShape
from megatron_dta.core.model.kernels import choose_recurrence
from megatron_dta.core.model.layers.rematerialize import call_without_keeping_input
from megatron_dta.core.model.parallel.context_group import ContextGroup, ToHeads, ToRows
from megatron_dta.families.gated_delta_net.sizes import Sizes

# Initial decay rates exp(A_log) are drawn between these.
DECAY_RATES = (1.0, 16.0)


def spec() -> ModuleSpec:
    """The spec of the layer in place of self-attention."""
    projections = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(module=GatedDeltaNet, submodules=projections)


def use_kernels(chunk: torch.nn.Module, model: ModelConfig, device: torch.device) -> None:
    """Let the layers of a model chunk run the gated delta rule and the gated norm on the chosen kernels."""
    rule = choose_recurrence(model, device, gated_delta_rule, "gated_delta_rule")
    for module in chunk.modules():
        if isinstance(module, GatedDeltaNet):
            module.recurrence, module.fuses_norm = rule, chunk.has_fused_layers


def decode_step(inputs: tuple[Tensor, ...], address: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """``delta_step`` of the decode kernels."""
    # Imported here because passes without the kernels do not need Triton.
    from dta_kernels.recurrence.decode_kernels import delta_step

    return delta_step(inputs, address, slots, positions)


class GatedDeltaNet(MegatronGatedDeltaNet):
    """Takes the place of ``SelfAttention`` in a layer; checkpoints are written by Megatron's class.

    Attributes:
        recurrence: computes the gated delta rule; ``use_kernels`` sets it.
        fuses_norm: whether the gated norm runs on its kernels.
        recurrent_shape: what is kept at a fork on this tensor rank.
    """

    recurrence: Recurrence = staticmethod(gated_delta_rule)
    fuses_norm: bool = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        # Megatron's own __init__ requires flash-linear-attention and a GPU.
        MegatronModule.__init__(self, config)
        self.layer_number, self.pg_collection = layer_number, pg_collection
        self.tp_group, self.tp_size = pg_collection.tp, pg_collection.tp.size()
        self._set_sizes(config.mixer)
        options = dict(config=config, bias=False, is_expert=False, tp_group=pg_collection.tp)
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            self.in_proj_dim,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **options,
        )
        channels = self.recurrent_shape.channels
        self.conv1d = torch.nn.Conv1d(channels, channels, self.conv_kernel_dim, groups=channels, bias=False)
        self.dt_bias = Parameter(torch.ones(self.num_v_heads_local_tp))
        self.A_log = Parameter(torch.zeros(self.num_v_heads_local_tp))
        self.out_norm = torch.nn.RMSNorm(self.value_head_dim, eps=config.layernorm_epsilon)
        self.out_proj = build_module(
            submodules.out_proj,
            self.v_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **options,
        )
        for divided in (self.conv1d.weight, self.dt_bias, self.A_log):
            tensor_parallel.set_tensor_model_parallel_attributes(divided, self.tp_size > 1, 0, 1)
        self._initialize()

    def _set_sizes(self, config: Sizes) -> None:
        """Sizes under the names that Megatron's ``sharded_state_dict`` reads."""
        self.conv_bias, self.conv_kernel_dim = False, config.linear_conv_kernel_dim
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.num_k_heads_local_tp = self.num_key_heads // self.tp_size
        self.num_v_heads_local_tp = self.num_value_heads // self.tp_size
        self.qk_dim, self.v_dim = self.key_head_dim * self.num_key_heads, self.value_head_dim * self.num_value_heads
        self.qk_dim_local_tp, self.v_dim_local_tp = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        self.in_proj_split_names = list(config.sections)
        self.in_proj_split_sections = tuple(rows // self.tp_size for rows in config.sections.values())
        self.in_proj_dim = self.tp_size * sum(self.in_proj_split_sections)
        self.conv_dim = 2 * self.qk_dim + self.v_dim
        self.conv_dim_local_tp = self.conv_dim // self.tp_size
        state = (self.num_v_heads_local_tp, self.key_head_dim, self.value_head_dim)
        self.recurrent_shape = RecurrentShape(state, self.conv_dim_local_tp, self.conv_kernel_dim)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Draw the parameters of all ranks and keep those of this one."""
        rank = self.tp_group.rank()
        bound = self.conv_kernel_dim**-0.5
        filters = torch.empty(self.conv_dim, 1, self.conv_kernel_dim).uniform_(-bound, bound)
        sections = filters.split([self.qk_dim, self.qk_dim, self.v_dim])
        self.conv1d.weight.copy_(torch.cat([section.chunk(self.tp_size)[rank] for section in sections]))
        rates = torch.empty(self.num_value_heads).uniform_(*DECAY_RATES)
        self.A_log.copy_(rates.log().chunk(self.tp_size)[rank])

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: object = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Output [n, 1, hidden size] for ``hidden_states`` [n, 1, hidden size], and None for a bias."""
        mixed = call_without_keeping_input(self.in_proj, hidden_states)[0].squeeze(1)
        context, num_tokens = packed_seq_params, mixed.shape[0]
        group = None
        if isinstance(context, AttentionContext):
            num_tokens = context.position_ids.shape[0]
            # A pass over no tokens has nothing to exchange.
            group = context.context_group if num_tokens else None
        out = self.mix(mixed, self.paths_of(context), num_tokens, group)
        return self.out_proj(out.unsqueeze(1))[0], None

    def paths_of(self, context: object) -> PathStates:
        """The states of the pass's paths; raises ValueError for a pass that has none."""
        states = check_context(context).path_states
        if states is None:
            raise ValueError(f"{type(context).__name__} keeps no states for layers with a recurrence")
        return states

    def mix(self, mixed: Tensor, paths: PathStates, num_tokens: int, group: ContextGroup | None = None) -> Tensor:
        """Gated output [n, J V] of the rows of ``in_proj``, [n, ...].

        Args:
            num_tokens: tokens of the pass; the rows after them are padding.
            group: the ranks that divide the rows; inside the recurrence they divide the heads.
        """
        qkv_width, values = self.conv_dim_local_tp, self.num_v_heads_local_tp
        qkv, z, beta, alpha = mixed.split([qkv_width, self.v_dim_local_tp, values, values], dim=-1)
        ranks = 1 if group is None else group.size
        weights = self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias
        if group is None:
            rows = qkv, beta, alpha
        else:
            rows = self._of_own_heads(group, qkv, beta, alpha)
            filters = torch.cat([part.chunk(ranks)[group.rank] for part in self._by_kind(weights[0], dim=0)])
            weights = filters, *(weight.chunk(ranks)[group.rank] for weight in weights[1:])
        rows = tuple(part[:num_tokens] for part in rows)
        out = self._recur(rows, weights, paths, ranks)
        missing = mixed.shape[0] * ranks - num_tokens
        out = F.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out
        out = out if group is None else ToRows.apply(group, out)
        return self._gated(out, z.reshape(-1, values, self.value_head_dim)).flatten(1)

    def _by_kind(self, qkv: Tensor, dim: int, ranks: int = 1) -> tuple[Tensor, ...]:
        """Channels of queries, of keys and of values; ``qkv`` has those of one of ``ranks``."""
        widths = (self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp)
        return qkv.split([width // ranks for width in widths], dim=dim)

    def _of_own_heads(self, group: ContextGroup, qkv: Tensor, beta: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
        """The same of all the group's rows, for the rank's heads; in one exchange."""
        parts = (*self._by_kind(qkv, dim=1), beta, alpha)
        joined = torch.cat([part.unflatten(1, (group.size, -1)) for part in parts], dim=2)
        heads = self.num_v_heads_local_tp // group.size
        (of_heads,) = ToHeads.apply(group, joined)
        return of_heads.squeeze(1).split([self.conv_dim_local_tp // group.size, heads, heads], dim=1)

    def _recur(self, rows: tuple[Tensor, ...], weights: tuple[Tensor, ...], paths: PathStates, ranks: int) -> Tensor:
        """The rule's output [N, J, V] for the tokens' rows of queries, keys and values, beta and alpha.

        Args:
            weights: filters, decay and its bias, of the heads in ``rows``.
            ranks: context ranks that divide the heads of the tensor rank.
        """
        (qkv, beta, alpha), (filters, decay, bias) = rows, weights
        qkv = paths.convolve(self.layer_number, qkv, filters)
        q, k, v = self._by_kind(qkv, 1, ranks)
        q, k = (part.unflatten(1, (-1, self.key_head_dim)) for part in (q, k))
        v = v.unflatten(1, (-1, self.value_head_dim))
        dtype = accumulation_dtype(qkv.dtype)
        g = -decay.to(dtype).exp() * F.softplus(alpha.to(dtype) + bias.to(dtype))
        state = self.recurrent_shape.divided(ranks).state
        return paths.recur(self.layer_number, self.recurrence, (q, k, v, g, beta.sigmoid()), state)

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        """RMSNorm of each head [N, J, V], times ``silu(z)``."""
        # Every rank normalizes its own heads with the same weight, so its gradient is summed over the ranks.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm.weight)
        if self.fuses_norm:
            # Imported here because the reference does not need Triton.
            from dta_kernels.recurrence.head_norms import gated_norm

            return gated_norm(out, z, weight, self.out_norm.eps)
        # The norm divides small outputs, so rounding to float32 on the way would show in the gradients.
        dtype = torch.float64 if out.dtype == torch.float32 else accumulation_dtype(out.dtype)
        x = out.to(dtype)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.out_norm.eps)
        return (normed * weight.to(dtype) * F.silu(z.to(dtype))).to(out.dtype)
