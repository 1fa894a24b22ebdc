"""A layer with a short convolution and a recurrence, in the place of self-attention; families derive theirs from it.

    in_proj    the sections that the sizes name: adjacent to each other those that are filtered, a gate for each channel
               of the output, one number for each head
    conv1d     one filter for each filtered channel
    out_norm   norm of the output, with the gate
    out_proj

Tensor parallelism divides the heads: every rank has its part of each section. Context parallelism divides the rows of a
pass outside the recurrence and these heads inside it (``parallel.context_group``): a rank convolves all tokens of its
heads, and keeps their states. The norm and the gate of the output, which need no other token, are computed on rows.

Legend: n rows of this rank, N tokens, J heads and V size of a head of the output; J is that of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Parameter

from dta_kernels.recurrence.contract import Recurrence
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.attention.context import AttentionContext, check_context
from megatron_dta.core.model.hybrid.path_states import PathStates, RecurrentShape
from megatron_dta.core.model.kernels import choose_recurrence
from megatron_dta.core.model.layers.lora import split_by_sections
from megatron_dta.core.model.layers.rematerialize import call_without_keeping_input
from megatron_dta.core.model.parallel.context_group import ContextGroup, ToHeads, ToRows

# Initial decay rates exp(A_log) are drawn between these.
DECAY_RATES = (1.0, 16.0)


@dataclass
class Projections:
    """Classes of the linear layers, for Megatron's spec."""

    in_proj: type = ColumnParallelLinear
    out_proj: type = RowParallelLinear


def spec_of(layer: type[RecurrentLayer]) -> ModuleSpec:
    """The spec of the layer in place of self-attention."""
    return ModuleSpec(module=layer, submodules=Projections())


def use_recurrence(chunk: torch.nn.Module, model: ModelConfig, device: torch.device, name: str) -> None:
    """Let the recurrent layers of a model chunk run on the chosen kernels; ``name`` is the library's function."""
    layers = [module for module in chunk.modules() if isinstance(module, RecurrentLayer)]
    for layer in layers:
        layer.recurrence = choose_recurrence(model, device, type(layer).recurrence, name)
        layer.fuses_norm = chunk.has_fused_layers


class RecurrentLayer(MegatronModule):
    """The parts that do not depend on the recurrence.

    Attributes:
        recurrence: computes it; ``use_recurrence`` sets another implementation.
        fuses_norm: whether the gated norm runs on its kernels, where it has any.
        recurrent_shape: what is kept at a fork on this tensor rank.
    """

    recurrence: Recurrence
    fuses_norm: bool = False

    def __init__(
        self, config: TransformerConfig, submodules: Projections, layer_number: int, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config)
        self.layer_number, self.tp_group, self.tp_size = layer_number, pg_collection.tp, pg_collection.tp.size()
        sizes = self.sizes = config.mixer
        self.in_proj_split_names = list(sizes.sections)
        self.in_proj_split_sections = [rows // self.tp_size for rows in sizes.sections.values()]
        self.section = dict(zip(self.in_proj_split_names, self.in_proj_split_sections, strict=True))
        self.num_heads = sizes.num_heads // self.tp_size
        before, channels = sizes.rows
        channels //= self.tp_size
        state = (self.num_heads, *sizes.head_state)
        self.recurrent_shape = RecurrentShape(state, channels, before + 1)
        options = dict(config=config, bias=False, is_expert=False, tp_group=pg_collection.tp)
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(sizes.sections.values()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **options,
        )
        self.conv1d = torch.nn.Conv1d(channels, channels, before + 1, groups=channels, bias=sizes.has_filter_bias)
        for name in sizes.head_vectors:
            setattr(self, name, Parameter(torch.ones(self.num_heads)))
        self.out_norm = torch.nn.RMSNorm(sizes.norm_width // self.norm_ranks, eps=config.layernorm_epsilon)
        self.out_proj = build_module(
            submodules.out_proj,
            sizes.num_heads * sizes.head_state[1],
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **options,
        )
        for name in self._divided:
            parameter = self.get_parameter(name)
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, self.tp_size > 1, 0, 1)
        self._initialize()

    @property
    def norm_ranks(self) -> int:
        """Number of tensor ranks that divide the weight of the norm."""
        return self.tp_size if self.sizes.norm_width > self.sizes.head_state[1] else 1

    @property
    def _divided(self) -> list[str]:
        """Parameters besides the projections of which every tensor rank has its rows."""
        names = ["conv1d.weight", *self.sizes.head_vectors]
        names += ["conv1d.bias"] * self.sizes.has_filter_bias
        return names + ["out_norm.weight"] * (self.norm_ranks > 1)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Draw the parameters of all ranks and keep those of this one."""
        rank, ranks, (before, channels) = self.tp_group.rank(), self.tp_size, self.sizes.rows
        bound = (before + 1) ** -0.5
        filters = torch.empty(channels, before + 2).uniform_(-bound, bound)
        sections = filters.split([self.sizes.sections[name] for name in self.sizes.filtered])
        filters = torch.cat([section.chunk(ranks)[rank] for section in sections])
        self.conv1d.weight.copy_(filters[:, 1:].unsqueeze(1))
        if self.conv1d.bias is not None:
            self.conv1d.bias.copy_(filters[:, 0])
        for name, values in self.initial_vectors().items():
            self.get_parameter(name).copy_(values.chunk(ranks)[rank])

    def initial_vectors(self) -> dict[str, Tensor]:
        """Values for the heads of all ranks; parameters that it does not name stay one."""
        rates = torch.empty(self.sizes.num_heads).uniform_(*DECAY_RATES)
        return {"A_log": rates.log()}

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
        sizes, ranks = self.sizes, 1 if group is None else group.size
        parts = dict(zip(self.in_proj_split_names, mixed.split(self.in_proj_split_sections, dim=-1), strict=True))
        begin = sum(self.in_proj_split_sections[: self.in_proj_split_names.index(sizes.filtered[0])])
        filtered = mixed[:, begin : begin + self.recurrent_shape.channels]
        rows = filtered, *(parts[name] for name in sizes.of_heads)
        filters, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        vectors = [self.get_parameter(name) for name in sizes.head_vectors]
        if group is not None:
            rows = self._of_own_heads(group, *rows)
            filters, bias = (None if part is None else self._own_channels(part, group) for part in (filters, bias))
            vectors = [vector.chunk(ranks)[group.rank] for vector in vectors]
        filtered, *of_heads = (part[:num_tokens] for part in rows)
        filtered = paths.convolve(self.layer_number, filtered, filters, bias)
        out = self.recur(self.by_kind(filtered, 1, ranks), of_heads, vectors, paths)
        missing = mixed.shape[0] * ranks - num_tokens
        out = F.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out
        out = out if group is None else ToRows.apply(group, out)
        return self.gated(out, parts[sizes.gate].reshape(out.shape)).flatten(1)

    def recur(
        self, kinds: tuple[Tensor, ...], of_heads: list[Tensor], vectors: list[Tensor], paths: PathStates
    ) -> Tensor:
        """Output [N, J, V] of the recurrence.

        Args:
            kinds: the filtered sections of the tokens.
            of_heads, vectors: the numbers and the parameters of the heads.
            paths: the states of the pass's paths.
        """
        raise NotImplementedError

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Norm and gate of the output [n, J, V]."""
        raise NotImplementedError

    def by_kind(self, filtered: Tensor, dim: int, ranks: int = 1) -> tuple[Tensor, ...]:
        """The filtered sections; ``filtered`` has those of one of ``ranks``."""
        return filtered.split([self.section[name] // ranks for name in self.sizes.filtered], dim=dim)

    def _own_channels(self, of_channels: Tensor, group: ContextGroup) -> Tensor:
        return torch.cat([part.chunk(group.size)[group.rank] for part in self.by_kind(of_channels, 0)])

    def _of_own_heads(self, group: ContextGroup, filtered: Tensor, *of_heads: Tensor) -> tuple[Tensor, ...]:
        """The same of all the group's rows, for the rank's heads; in one exchange."""
        parts = (*self.by_kind(filtered, 1), *of_heads)
        joined = torch.cat([part.unflatten(1, (group.size, -1)) for part in parts], dim=2)
        heads = self.num_heads // group.size
        (of_rank,) = ToHeads.apply(group, joined)
        return of_rank.squeeze(1).split([filtered.shape[1] // group.size, *[heads] * len(of_heads)], dim=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None, **_: Any
    ) -> dict[str, Any]:
        """Shards for Megatron's distributed checkpoints, section by section, which load on any mesh."""
        replicas = (metadata or {}).get("dp_cp_group") or parallel_state.get_data_parallel_group(
            with_context_parallel=True
        )
        state = {name: value for name, value in self.state_dict(keep_vars=True).items() if "_proj" not in name}
        shards = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(self._divided, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=replicas,
        )
        for name, module in self.named_children():
            if "_proj" in name:
                shards |= sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
        filtered = {name: self.section[name] for name in self.sizes.filtered}
        for name, sections in (
            ("in_proj.weight", self.section),
            ("conv1d.weight", filtered),
            ("conv1d.bias", filtered),
        ):
            if prefix + name in shards:
                shards[prefix + name] = split_by_sections(shards[prefix + name], sections)
        return shards
