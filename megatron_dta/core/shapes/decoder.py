"""Describes a decoder by its sizes and counts its parameters: on each rank of a mesh, and those a token passes through.

The counts cover the layers that this package builds: attention or another mixer of tokens, gated or plain feed-forward
layers without biases, RMSNorm, optional norms of queries and keys, optional biases on queries, keys and values, and
experts. A tensor group divides every matrix; norms and routers are replicated on its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.shapes.mixer import Mixer


@dataclass(frozen=True)
class RankParameters:
    """Number of parameters on a rank.

    Attributes:
        dense: parameters that all data-parallel ranks replicate.
        experts: parameters of routed experts, replicated only on ranks with the same experts.
    """

    dense: int
    experts: int = 0

    @property
    def total(self) -> int:
        """Dense and expert parameters."""
        return self.dense + self.experts

    def __add__(self, other: RankParameters) -> RankParameters:
        return RankParameters(self.dense + other.dense, self.experts + other.experts)


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder, with Megatron's names.

    Attributes:
        moe_layers: whether each layer has experts; empty means all layers if ``num_experts`` is set, else none.
        mixer: sizes of the mixer that some layers have instead of attention; None without such layers.
        mixer_layers: whether each layer has it; empty means all layers if ``mixer`` is set.
        hybrid_layer_pattern: a letter for each layer with one part only: M for ``mixer``, * for attention, - for
            feed-forward, E for experts; None if each layer mixes tokens and has a feed-forward part. It decides
            ``moe_layers`` and ``mixer_layers``.
        norm_epsilon, rotary_base, use_rope_scaling: do not affect the counts; used in the flags of a training command.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    swiglu: bool = True
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = True
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_layers: tuple[bool, ...] = ()
    attention_output_gate: bool = False
    mixer: Mixer | None = None
    mixer_layers: tuple[bool, ...] = ()
    hybrid_layer_pattern: str | None = None
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    use_rope_scaling: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.vocab_size < 1 or self.ffn_hidden_size < 1:
            raise InputError("--vocab-size and --ffn-hidden-size must be at least 1")
        if self.num_attention_heads % self.num_query_groups:
            raise InputError(
                f"--num-attention-heads {self.num_attention_heads} is not divisible by --num-query-groups "
                f"{self.num_query_groups}"
            )
        if self.hybrid_layer_pattern is not None:
            object.__setattr__(self, "moe_layers", tuple(letter == "E" for letter in self.hybrid_layer_pattern))
            object.__setattr__(self, "mixer_layers", tuple(letter == "M" for letter in self.hybrid_layer_pattern))
        if not self.moe_layers:
            object.__setattr__(self, "moe_layers", (self.num_experts is not None,) * self.num_layers)
        if self.mixer is not None and not self.mixer_layers:
            object.__setattr__(self, "mixer_layers", (True,) * self.num_layers)
        if not any(self.mixer_layers):
            object.__setattr__(self, "mixer_layers", ())
            object.__setattr__(self, "mixer", None)
        if self.mixer_layers and len(self.mixer_layers) != self.num_layers:
            raise InputError(f"mixer_layer_freq names {len(self.mixer_layers)} of {self.num_layers} layers")
        if len(self.moe_layers) != self.num_layers:
            raise InputError(f"--moe-layer-freq names {len(self.moe_layers)} of {self.num_layers} layers")
        if self.num_experts is not None and self.moe_router_topk > self.num_experts:
            raise InputError(f"--moe-router-topk {self.moe_router_topk} is more than --num-experts {self.num_experts}")

    @classmethod
    def of(cls, settings: Any, **known: Any) -> DecoderShape:
        """Read the shape from an object with the attributes of ``ModelConfig``; ``known`` replaces some of them.

        Raises InputError if the vocabulary size is None.
        """
        values = {field.name: getattr(settings, field.name) for field in fields(cls)} | known
        if values["vocab_size"] is None:
            raise InputError("--vocab-size is needed to plan a run: without it the tokenizer would decide")
        return cls(**values | {name: tuple(values[name]) for name in ("moe_layers", "mixer_layers")})

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_width(self) -> int:
        """Channels of all key heads, which is also that of all value heads."""
        return self.num_query_groups * self.kv_channels

    @property
    def attention_weights(self) -> int:
        """Matrix entries of the attention of a layer that has it."""
        gate = self.query_width if self.attention_output_gate else 0
        return self.hidden_size * (2 * (self.query_width + self.kv_width) + gate)

    @property
    def num_attention_layers(self) -> int:
        return sum(map(self.has_attention, range(self.num_layers)))

    def part_share(self) -> float:
        """Share of the parts that layers with attention or a mixer, and a feed-forward part, would have."""
        layers = range(self.num_layers)
        return (sum(map(self.mixes, layers)) + sum(map(self.feeds_forward, layers))) / (2 * self.num_layers)

    def attention_share(self, layers: Sequence[int] | None = None) -> float:
        """Share of ``layers`` that have attention; of all layers if None or empty."""
        with_attention = [self.has_attention(layer) for layer in layers or range(self.num_layers)]
        return sum(with_attention) / len(with_attention)

    @property
    def recurrent_operations(self) -> int:
        """Operations of the forward for a token in the recurrences of all layers, without products with weights."""
        return sum(self.mixer_layers) * self.mixer.token_operations if self.mixer is not None else 0

    @property
    def recurrent_channels(self) -> int:
        """Channels of the convolution of layers with a recurrence."""
        return self.mixer.rows[1] if self.mixer is not None else 0

    @property
    def recurrent_exchanged(self) -> int:
        """Channels that context ranks exchange for a token of a layer with a recurrence."""
        return sum(self.mixer.exchanged) if self.mixer is not None else 0

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps states at forks instead of keys and values."""
        return self.has_mixer(layer) and self.mixer.is_recurrent

    def has_attention(self, layer: int) -> bool:
        """Whether a layer keeps keys and values."""
        return self.mixes(layer) and not self.is_recurrent(layer)

    def mixes(self, layer: int) -> bool:
        """Whether a layer has attention or ``mixer``."""
        return self.hybrid_layer_pattern is None or self.hybrid_layer_pattern[layer] in "M*"

    def feeds_forward(self, layer: int) -> bool:
        """Whether a layer has a feed-forward part or experts."""
        return self.hybrid_layer_pattern is None or self.hybrid_layer_pattern[layer] in "-E"

    @property
    def keeps_rows(self) -> bool:
        """Whether a pool keeps rows of the mixer's own kind in place of keys and values."""
        return self.mixer is not None and self.mixer.slot is not None

    @property
    def pair_width(self) -> float:
        """Half of the channels of scores and values that a pair of tokens takes in the attention of a layer."""
        return self.mixer.pair_width if self.keeps_rows else self.query_width

    def slot_width(self, tensor_size: int) -> float:
        """Numbers that the pool of a tensor rank keeps of a token in a layer with attention."""
        return self.mixer.slot if self.keeps_rows else 2 * (self.kv_width // tensor_size)

    @property
    def expansion(self) -> int:
        """Matrix entries that each token on a segment's path is multiplied with in a layer's attention."""
        return self.mixer.expansion if self.keeps_rows else 0

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer has ``mixer`` instead of attention."""
        return bool(self.mixer_layers) and self.mixer_layers[layer]

    def mixer_weights(self, layer: int) -> int:
        """Matrix entries of a layer's attention or other mixer."""
        if self.has_mixer(layer):
            return self.mixer.weights(self.hidden_size)
        return self.attention_weights if self.mixes(layer) else 0

    @property
    def expert_width(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    def _ffn(self, width: int) -> int:
        return (3 if self.swiglu else 2) * self.hidden_size * width

    @property
    def _shared(self) -> int:
        return self._ffn(self.moe_shared_expert_intermediate_size or 0)

    def kinds(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """(index of a layer, number of such layers) for the ``layers`` without and with experts, each with attention or
        with the other mixer.
        """
        by_kind: dict[tuple, list[int]] = {}
        for layer in layers:
            by_kind.setdefault((self.moe_layers[layer], self.has_mixer(layer), self.mixes(layer)), []).append(layer)
        return [(by_kind[kind][0], len(by_kind[kind])) for kind in sorted(by_kind)]

    def layer_parameters(self, layer: int, tensor: int = 1, experts: int = 1, expert_tensor: int = 1) -> RankParameters:
        """Parameters of a layer (from 0) on one rank."""
        norms = (self.mixes(layer) + self.feeds_forward(layer)) * self.hidden_size
        if self.has_mixer(layer):
            divided, undivided = self.mixer.vectors
            divided, undivided = divided + self.mixer.weights(self.hidden_size), undivided + norms
        elif not self.mixes(layer):
            divided, undivided = 0, norms
        else:
            undivided = norms + (2 * self.kv_channels if self.qk_layernorm else 0)
            divided = self.attention_weights + (self.query_width + 2 * self.kv_width) * self.add_qkv_bias
        if not self.moe_layers[layer]:
            return RankParameters(undivided + (divided + self._ffn(self.layer_width(layer))) // tensor)
        undivided += self.num_experts * self.hidden_size + self.hidden_size * self.moe_shared_expert_gate
        routed = self.num_experts // experts * self._ffn(self.expert_width) // expert_tensor
        return RankParameters(undivided + (divided + self._shared) // tensor, routed)

    def stage_parameters(
        self, layers: Sequence[int], virtual_stage: int, tensor: int = 1, experts: int = 1, expert_tensor: int = 1
    ) -> RankParameters:
        """Parameters of a virtual stage on one rank; ``layers`` has the number of layers of each virtual stage.

        The first virtual stage has the embedding. The last one has the final norm and the output matrix, or a copy of
        the embedding if the two share their weights.
        """
        first = sum(layers[:virtual_stage])
        total = RankParameters(0)
        for layer, count in self.kinds(range(first, first + layers[virtual_stage])):
            of_layer = self.layer_parameters(layer, tensor, experts, expert_tensor)
            total += RankParameters(count * of_layer.dense, count * of_layer.experts)
        table = -(-self.vocab_size // tensor) * self.hidden_size
        is_first, is_last = virtual_stage == 0, virtual_stage == len(layers) - 1
        tables = is_first + (is_last and (self.untie_embeddings_and_output_weights or not is_first))
        return total + RankParameters(tables * table + self.hidden_size * is_last)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return self.stage_parameters([self.num_layers], 0).total

    @property
    def routed_weights(self) -> int:
        """Matrix entries of the routed experts that a token is multiplied with in a layer with experts."""
        return self.moe_router_topk * self._ffn(self.expert_width)

    def token_weights(self, layer: int) -> int:
        """Matrix entries that a token is multiplied with in a layer."""
        if not self.moe_layers[layer]:
            return self.mixer_weights(layer) + self._ffn(self.layer_width(layer))
        router = self.num_experts * self.hidden_size
        return self.mixer_weights(layer) + router + self._shared + self.routed_weights

    @property
    def layer_weights(self) -> int:
        """Matrix entries that a token is multiplied with in all layers."""
        return sum(n * self.token_weights(layer) for layer, n in self.kinds(range(self.num_layers)))

    def layer_width(self, layer: int) -> int:
        """Width of the feed-forward part of a layer that a token passes through."""
        if not self.moe_layers[layer]:
            return self.ffn_hidden_size if self.feeds_forward(layer) else 0
        return self.moe_router_topk * self.expert_width + (self.moe_shared_expert_intermediate_size or 0)


def context_refusal(tensor: int, context: int, num_heads: int, num_kv_heads: int) -> str | None:
    """Why heads cannot be divided over tensor and context ranks; None if they can.

    Each rank has whole key/value heads, or one that it shares with others, which have other query heads of it.
    """
    ranks = tensor * context
    is_whole = num_kv_heads % ranks == 0
    is_shared = ranks % num_kv_heads == 0 and num_heads % ranks == 0
    if context == 1 or is_whole or is_shared:
        return None
    return (
        f"--context-parallel-size {context} x --tensor-model-parallel-size {tensor} does not divide the heads: the "
        f"product must be a divisor of --num-query-groups {num_kv_heads}, or a multiple of it that divides "
        f"--num-attention-heads {num_heads}"
    )
