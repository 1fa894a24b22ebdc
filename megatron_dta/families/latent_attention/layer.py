"""The latent attention layer of DeepSeek V3 (arXiv:2412.19437), with Megatron's parameters.

    linear_q_proj                       queries; or low-rank: linear_q_down_proj, q_layernorm, linear_q_up_proj
    linear_kv_down_proj, kv_layernorm   a token's latent, normed, and its key for positions, which all heads share
    linear_kv_up_proj                   of each head: the rest of its key, and its value, both from the latent
    linear_proj                         the output

A pool or cache holds the normed latent and the rotated key, one row a token, instead of keys and values
(``path_attention``, ``decoding``). Megatron's own module numbers the positions of a segment from 0.

Tensor parallelism divides the heads. The products down to the latents are divided by rows and gathered, so every rank
has the latents of all tokens, also under sequence parallelism. What a rank's heads add to the gradient of a latent is
summed over the ranks once, after all descendants have added theirs.

Legend: n rows of the pass, H query heads of this rank, K channels of a query (content, then position), V of a value,
L of a latent, R of a key for positions.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dta_kernels.tree_attention.reference import accumulation_dtype
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.attention.context import AttentionContext, check_context
from megatron_dta.core.model.attention.segment_context import SegmentContext
from megatron_dta.core.model.decode.decode_context import DecodeContext
from megatron_dta.core.model.layers.lora import SUFFIX
from megatron_dta.core.model.main_grad import MainGradColumnParallelLinear, main_grad_of, output_rows
from megatron_dta.core.model.rotary import rotary_tables
from megatron_dta.families.latent_attention.decoding import attend_latents
from megatron_dta.families.latent_attention.expansion import Expansion, expanded
from megatron_dta.families.latent_attention.path_attention import attend_on_path

# Of the norms of latents: transformers' classes have it fixed, whatever config.json says of the other norms.
LATENT_NORM_EPSILON = 1e-6


@dataclass
class LatentSubmodules:
    """Classes of the layer's modules, under Megatron's names."""

    linear_q_proj: type = ColumnParallelLinear
    linear_q_down_proj: type = ColumnParallelLinear
    linear_q_up_proj: type = ColumnParallelLinear
    linear_kv_down_proj: type = ColumnParallelLinear
    linear_kv_up_proj: type = ColumnParallelLinear
    linear_proj: type = RowParallelLinear
    q_layernorm: type = WrappedTorchNorm
    kv_layernorm: type = WrappedTorchNorm


def spec() -> ModuleSpec:
    """The spec of the layer in place of self-attention."""
    return ModuleSpec(module=LatentAttention, submodules=LatentSubmodules())


def use_kernels(chunk: torch.nn.Module, model: ModelConfig, device: torch.device) -> None:
    """The kernels of its attention are chosen with those of any attention, by the engine."""


class LatentAttention(MegatronModule):
    """Takes the place of ``SelfAttention`` in a layer.

    Attributes:
        softmax_scale: factor on the scores, which grows with YaRN's scaling of positions.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.num_heads = config.num_attention_heads // self.tp_group.size()
        self.sizes = sizes = config.mixer
        growth = math.log(max(1.0, getattr(config, "yarn_rotary_scaling_factor", 1.0)))
        mscale = 1 + 0.1 * getattr(config, "yarn_mscale_all_dim", 0.0) * growth
        self.softmax_scale = mscale**2 * sizes.query_size**-0.5
        # Latents are complete on every rank, so what follows them must not gather them as parts of a sequence.
        complete = copy.copy(config)
        complete.sequence_parallel = False
        heads, latent = config.num_attention_heads, sizes.kv_lora_rank
        if sizes.q_lora_rank is None:
            self.linear_q_proj = self._linear(submodules.linear_q_proj, config.hidden_size, heads * sizes.query_size)
        else:
            self.linear_q_down_proj = self._linear(submodules.linear_q_down_proj, config.hidden_size, sizes.q_lora_rank)
            self.q_layernorm = self._norm(submodules.q_layernorm, sizes.q_lora_rank, complete)
            self.linear_q_up_proj = self._linear(
                submodules.linear_q_up_proj, sizes.q_lora_rank, heads * sizes.query_size, complete
            )
        self.linear_kv_down_proj = self._linear(submodules.linear_kv_down_proj, config.hidden_size, sizes.slot)
        self.kv_layernorm = self._norm(submodules.kv_layernorm, latent, complete)
        expanded_size = heads * (sizes.qk_head_dim + sizes.v_head_dim)
        self.linear_kv_up_proj = self._linear(
            submodules.linear_kv_up_proj, latent, expanded_size, complete, disable_grad_reduce=True
        )
        self.linear_proj = self._linear(
            submodules.linear_proj, heads * sizes.v_head_dim, config.hidden_size,
            init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True,
        )  # fmt: skip

    def _linear(
        self, module: Any, inputs: int, outputs: int, config: TransformerConfig | None = None, **options: Any
    ) -> torch.nn.Module:
        common = dict(
            config=config or self.config, init_method=self.config.init_method, bias=False, skip_bias_add=False
        )
        if "input_is_parallel" not in options:
            common["gather_output"] = False
        return build_module(module, inputs, outputs, is_expert=False, tp_group=self.tp_group, **common | options)

    def _norm(self, module: Any, size: int, config: TransformerConfig) -> torch.nn.Module:
        return build_module(module, config=config, hidden_size=size, eps=LATENT_NORM_EPSILON)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: object = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Output [n, 1, hidden size] for ``hidden_states`` [n, 1, hidden size], and None for a bias.

        Args:
            rotary_pos_emb: [n, 1, 1, R], the angles of the pass's positions, each twice.
        """
        context = check_context(packed_seq_params)
        tables = context.rotary_tables or rotary_tables(rotary_pos_emb, self.config)
        query, latents = self._queries_and_latents(hidden_states, tables)
        # Padding tokens of sequence parallelism attend to nothing, and no token attends to them.
        rows, n = query.shape[0], context.position_ids.shape[0]
        out = self._attend(context, query[:n], latents[:n])
        out = F.pad(out, (0, 0, 0, 0, 0, rows - n)) if rows > n else out
        return self.linear_proj(out.flatten(1).unsqueeze(1))[0], None

    def _attend(self, context: AttentionContext, query: Tensor, latents: Tensor) -> Tensor:
        """Output [n, H, V] for ``query`` [n, H, K] and the pass's latents [n, 1, L + R]."""
        number, scale = self.layer_number, self.softmax_scale
        if isinstance(context, DecodeContext):
            return attend_latents(context, number, query, latents, self.expansion(), scale)
        if isinstance(context, SegmentContext):
            out = attend_on_path(context, number, query, latents, self.expansion, scale)
        else:
            expansion = self.expansion(in_buffer=False)
            heads = expanded(expansion.rows(latents), expansion.matrices(slice(None)))
            out = context.attend(number, query, *heads, scale)
        return out[..., : self.sizes.v_head_dim]

    def _queries_and_latents(self, hidden_states: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries [n, H, K] and, the same on every rank, normed latents with rotated keys [n, 1, L + R]."""
        sizes, group = self.sizes, self.tp_group
        if sizes.q_lora_rank is None:
            rows = self.linear_q_proj(hidden_states)[0]
        else:
            down = gather_from_tensor_model_parallel_region(self.linear_q_down_proj(hidden_states)[0], group)
            rows = self.linear_q_up_proj(self.q_layernorm(down))[0]
        rows, positions = rows.view(len(rows), self.num_heads, -1), [sizes.qk_pos_emb_head_dim]
        content, of_query = rows.split([sizes.qk_head_dim, *positions], dim=-1)
        down = gather_from_tensor_model_parallel_region(self.linear_kv_down_proj(hidden_states)[0], group)
        latent, of_key = down.split([sizes.kv_lora_rank, *positions], dim=-1)
        position = rotated(torch.cat([of_query, of_key], dim=1), tables)
        latents = torch.cat([self.kv_layernorm(latent), position[:, -1:]], dim=-1)
        query = torch.cat([content, position[:, :-1]], dim=-1)
        return query, copy_to_tensor_model_parallel_region(latents, group)

    def expansion(self, in_buffer: bool = True) -> Expansion:
        """``linear_kv_up_proj`` and its adapter; ``in_buffer`` if the weight's gradient goes to its buffer."""
        linear, of_heads, buffer = self.linear_kv_up_proj, (self.num_heads, -1), None
        weight, adapter = linear.weight, getattr(self, "linear_kv_up_proj" + SUFFIX, None)
        if in_buffer and isinstance(linear, MainGradColumnParallelLinear) and main_grad_of(weight) is not None:
            buffer = weight.main_grad.unflatten(0, of_heads)
            weight = output_rows(weight, len(weight), is_embedding=False)
        tensors = {"weight": weight.unflatten(0, of_heads)}
        if adapter is not None and adapter.enabled:
            tensors["a"] = copy_to_tensor_model_parallel_region(adapter.lora_A, self.tp_group) * adapter.scale
            tensors["b"] = adapter.lora_B.unflatten(0, of_heads)
        return Expansion(self.sizes, tensors, buffer)


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` [n, heads, R] rotated, whose pairs of channels are adjacent; first all first ones, then all second ones."""
    dtype = accumulation_dtype(x.dtype)
    cos, sin = (table.to(dtype).unsqueeze(1) for table in tables)
    first, second = x[..., 0::2].to(dtype), x[..., 1::2].to(dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
