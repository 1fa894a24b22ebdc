"""Maps Hugging Face tensors to Megatron parameters with one table of rules per architecture.

Names in a rule are relative to the layer; ``{expert}`` stands for an expert's number. All code that reads or writes
weights uses the result of ``parameters_of``, so a new architecture needs only a new table. Megatron's names are those
of its local layer specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.training.huggingface.parameters import (
    PREFIX,
    Block,
    Parameter,
    Sharding,
    concatenated_blocks,
    gated_head_group_blocks,
    head_group_blocks,
    interleaved_blocks,
)


@dataclass(frozen=True)
class ModelShape(DecoderShape):
    """The sizes that determine the names and shapes of a model's weights."""

    make_vocab_size_divisible_by: int = 1

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Rows of the padded embedding with ``tensor_size`` tensor-parallel ranks."""
        unit = self.make_vocab_size_divisible_by * tensor_size
        return -(-self.vocab_size // unit) * unit

    @property
    def recurrent_sections(self) -> dict[str, int]:
        """Rows of the sections of gated delta net's input projection, in Megatron's order."""
        keys, width = self.linear_num_key_heads * self.linear_key_head_dim, self.linear_width
        heads = self.linear_num_value_heads
        return {"query": keys, "key": keys, "value": width, "z": width, "beta": heads, "alpha": heads}

    def size_of(self, dimension: str) -> int:
        """The size of a dimension that the tables name."""
        sections, shared = self.recurrent_sections, self.moe_shared_expert_intermediate_size or 0
        sizes = {
            "hidden": self.hidden_size,
            "head": self.kv_channels,
            "query": self.query_width,
            "query_key_value": self.query_width + 2 * self.kv_width,
            "gated_query_key_value": 2 * (self.query_width + self.kv_width),
            "recurrent": sum(sections.values()),
            "filters": sections["query"] + sections["key"] + sections["value"],
            "filter_width": self.linear_conv_kernel_dim,
            "recurrent_values": sections["value"],
            "recurrent_head": self.linear_value_head_dim,
            "recurrent_heads": self.linear_num_value_heads,
            "feed_forward": self.ffn_hidden_size,
            "gate_up": 2 * self.ffn_hidden_size,
            "expert": self.expert_width,
            "expert_gate_up": 2 * self.expert_width,
            "experts": self.num_experts or 0,
            "shared_experts": shared,
            "shared_gate_up": 2 * shared,
            "one": 1,
            "vocabulary": self.vocab_size,
        }
        return sizes[dimension]


class Place(Enum):
    """The part of a model that a rule applies to."""

    EMBEDDING = "before the layers"
    LAYER = "every layer"
    ATTENTION = "layers with attention"
    RECURRENT = "layers with gated delta net"
    DENSE = "layers without experts"
    MIXTURE = "layers with experts"
    EXPERT = "every expert of a layer"
    END = "after the layers"
    OUTPUT = "after the layers, if the output weight is not the embedding"


@dataclass(frozen=True)
class Rule:
    """The parameter ``megatron`` with the dimensions ``shape`` consists of the tensors ``huggingface``.

    Attributes:
        arrangement: function that returns the blocks for the tensors' names; None for one tensor, the rows of query,
            key and value, or a stack.
        sections: names of the ``recurrent_sections`` that ranks divide.
    """

    part: Place
    megatron: str
    huggingface: tuple[str, ...]
    shape: tuple[str, ...]
    sharding: Sharding = Sharding.WHOLE
    arrangement: Callable[[ModelShape, tuple[str, ...]], tuple[Block, ...]] | None = None
    sections: tuple[str, ...] = ()

    def blocks(self, shape: ModelShape, rename: Callable[[str], str]) -> tuple[Block, ...]:
        """The blocks of the parameter; ``rename`` completes the tensors' names."""
        names, rows = tuple(rename(name) for name in self.huggingface), shape.size_of(self.shape[0])
        if self.arrangement is not None:
            return self.arrangement(shape, names)
        if len(names) == 3:
            per_group = shape.num_attention_heads // shape.num_query_groups
            return head_group_blocks(names, shape.num_query_groups, per_group, shape.kv_channels)
        return concatenated_blocks(names, (rows // len(names),) * len(names))


def _query_key_value(kind: str, dimensions: tuple[str, ...]) -> Rule:
    tensors = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return Rule(Place.ATTENTION, f"self_attention.linear_qkv.{kind}", tensors, dimensions, Sharding.ROWS)


def _feed_forward(part: Place, megatron: str, gate: str, up: str, down: str, width: str, gate_up: str) -> list[Rule]:
    first, second = (f"{megatron}linear_fc{number}.weight" for number in (1, 2))
    both = (f"{gate}.weight", f"{up}.weight")
    return [
        Rule(part, first, both, (gate_up, "hidden"), Sharding.GATED_ROWS),
        Rule(part, second, (f"{down}.weight",), ("hidden", width), Sharding.COLUMNS),
    ]


OUTSIDE_LAYERS = [
    Rule(
        Place.EMBEDDING,
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        ("vocabulary", "hidden"),
        Sharding.VOCABULARY,
    ),
    Rule(Place.END, "decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden",)),
    Rule(Place.OUTPUT, "output_layer.weight", ("lm_head.weight",), ("vocabulary", "hidden"), Sharding.VOCABULARY),
]
ATTENTION = [
    Rule(
        Place.LAYER,
        "input_layernorm.weight",
        ("input_layernorm.weight",),
        ("hidden",),
    ),
    _query_key_value("weight", ("query_key_value", "hidden")),
    Rule(
        Place.ATTENTION,
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight",),
        ("hidden", "query"),
        Sharding.COLUMNS,
    ),
    Rule(
        Place.LAYER,
        "pre_mlp_layernorm.weight",
        ("post_attention_layernorm.weight",),
        ("hidden",),
    ),
]
QUERY_KEY_VALUE_BIAS = [_query_key_value("bias", ("query_key_value",))]
QUERY_KEY_NORM = [
    Rule(Place.ATTENTION, "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("head",)),
    Rule(Place.ATTENTION, "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("head",)),
]


def _gated_query_key_value(shape: ModelShape, names: tuple[str, ...]) -> tuple[Block, ...]:
    per_group = shape.num_attention_heads // shape.num_query_groups
    return gated_head_group_blocks(names, shape.num_query_groups, per_group, shape.kv_channels)


def _by_head(shape: ModelShape, names: tuple[str, ...]) -> tuple[Block, ...]:
    """Qwen3-Next's input projection of gated delta net: the parts of a key head are adjacent."""
    rows = tuple(shape.recurrent_sections.values())
    return interleaved_blocks(names, (rows[:4], rows[4:]), shape.linear_num_key_heads)


def _by_section(shape: ModelShape, names: tuple[str, ...]) -> tuple[Block, ...]:
    """Qwen3.5's: query, key and value of all heads in one tensor, then one tensor each."""
    query, key, value, *rest = shape.recurrent_sections.values()
    return concatenated_blocks(names, (query + key + value, *rest))


def hybrid_layers(fused: bool) -> list[Rule]:
    """Norms, gated attention and gated delta net; ``fused`` is for Qwen3-Next, whose projections are two tensors."""
    norms = [rule for rule in ATTENTION if rule.part is Place.LAYER]
    attention = [rule for rule in ATTENTION if rule.megatron == "self_attention.linear_proj.weight"]
    gated = _query_key_value("weight", ("gated_query_key_value", "hidden"))
    parts = ("in_proj_qkvz", "in_proj_ba") if fused else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    sections, filters = ("query", "key", "value", "z", "beta", "alpha"), ("query", "key", "value")

    def recurrent(megatron: str, huggingface: tuple[str, ...], shape: tuple[str, ...], *options: Any) -> Rule:
        names = tuple(f"linear_attn.{name}" for name in huggingface)
        return Rule(Place.RECURRENT, f"self_attention.{megatron}", names, shape, *options)

    return [
        *norms,
        replace(gated, arrangement=_gated_query_key_value),
        *attention,
        *QUERY_KEY_NORM,
        replace(
            recurrent(
                "in_proj.weight",
                tuple(f"{part}.weight" for part in parts),
                ("recurrent", "hidden"),
                Sharding.SECTION_ROWS,
            ),
            arrangement=_by_head if fused else _by_section,
            sections=sections,
        ),
        replace(
            recurrent("conv1d.weight", ("conv1d.weight",), ("filters", "filter_width"), Sharding.SECTION_ROWS),
            sections=filters,
        ),
        recurrent("dt_bias", ("dt_bias",), ("recurrent_heads",), Sharding.ROWS),
        recurrent("A_log", ("A_log",), ("recurrent_heads",), Sharding.ROWS),
        recurrent("out_norm.weight", ("norm.weight",), ("recurrent_head",)),
        recurrent("out_proj.weight", ("out_proj.weight",), ("hidden", "recurrent_values"), Sharding.COLUMNS),
    ]


DENSE = _feed_forward(Place.DENSE, "mlp.", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "feed_forward", "gate_up")


def _mixture(module: str, gate: str, up: str, down: str) -> list[Rule]:
    router = Rule(Place.MIXTURE, "mlp.router.weight", (f"{module}.gate.weight",), ("experts", "hidden"))
    expert = module + ".experts.{expert}."
    names = (expert + gate, expert + up, expert + down)
    return [
        router,
        *_feed_forward(Place.EXPERT, "mlp.experts.local_experts.{expert}.", *names, "expert", "expert_gate_up"),
    ]


SHARED_MIXTURE = [
    *_mixture("mlp", "gate_proj", "up_proj", "down_proj"),
    *_feed_forward(
        Place.MIXTURE,
        "mlp.shared_experts.",
        *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
        "shared_experts",
        "shared_gate_up",
    ),
    Rule(Place.MIXTURE, "mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), ("one", "hidden")),
]
ARCHITECTURES: dict[str, list[Rule]] = {
    "LlamaForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *DENSE],
    "MistralForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *DENSE],
    "MixtralForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *_mixture("block_sparse_moe", "w1", "w3", "w2")],
    "Qwen2ForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *QUERY_KEY_VALUE_BIAS, *DENSE],
    "Qwen3ForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *QUERY_KEY_NORM, *DENSE],
    "Qwen3MoeForCausalLM": [
        *OUTSIDE_LAYERS,
        *ATTENTION,
        *QUERY_KEY_NORM,
        *DENSE,
        *_mixture("mlp", "gate_proj", "up_proj", "down_proj"),
    ],
    "Qwen3NextForCausalLM": [*OUTSIDE_LAYERS, *hybrid_layers(fused=True), *DENSE, *SHARED_MIXTURE],
    "Qwen3_5ForCausalLM": [*OUTSIDE_LAYERS, *hybrid_layers(fused=False), *DENSE],
    "Qwen3_5MoeForCausalLM": [*OUTSIDE_LAYERS, *hybrid_layers(fused=False), *SHARED_MIXTURE],
}


def rules_of(architecture: str) -> list[Rule]:
    """The table of an architecture.

    Raises:
        InputError: the architecture is not supported.
    """
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"the architecture {architecture} cannot be converted; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]


def parameters_of(architecture: str, shape: ModelShape, prefix: str = PREFIX) -> list[Parameter]:
    """All parameters of the whole model, in the order of the forward pass.

    Args:
        prefix: what the names of the text model's tensors begin with, see ``files.text_prefix``.
    """
    parameters = _parameters(rules_of(architecture), shape)
    if prefix == PREFIX:
        return parameters
    return [
        replace(
            parameter,
            blocks=tuple(block._replace(tensor=_prefixed(block.tensor, prefix)) for block in parameter.blocks),
        )
        for parameter in parameters
    ]


def _prefixed(tensor: str, prefix: str) -> str:
    if tensor.startswith(PREFIX):
        return prefix + tensor.removeprefix(PREFIX)
    # The output weight lies beside the text model, in models with a vision tower sometimes inside another one.
    return prefix.removesuffix(PREFIX) + tensor if prefix.endswith("." + PREFIX) else tensor


def _parameters(rules: list[Rule], shape: ModelShape) -> list[Parameter]:
    parameters = [_parameter(rule, shape) for rule in rules if rule.part is Place.EMBEDDING]
    for layer in range(shape.num_layers):
        mixture = shape.moe_layers[layer]
        attention = Place.RECURRENT if shape.is_linear(layer) else Place.ATTENTION
        kinds = {Place.LAYER, attention, Place.MIXTURE if mixture else Place.DENSE}
        parameters += [_parameter(rule, shape, layer) for rule in rules if rule.part in kinds]
        for expert in range(shape.num_experts or 0) if mixture else ():
            parameters += [_parameter(rule, shape, layer, expert) for rule in rules if rule.part is Place.EXPERT]
    ends = {Place.END} | ({Place.OUTPUT} if shape.untie_embeddings_and_output_weights else set())
    return parameters + [_parameter(rule, shape) for rule in rules if rule.part in ends]


def _parameter(rule: Rule, shape: ModelShape, layer: int | None = None, expert: int | None = None) -> Parameter:
    prefix = "" if layer is None else f"decoder.layers.{layer}."
    tensor_prefix = "" if layer is None else f"model.layers.{layer}."

    def numbered(name: str) -> str:
        return name.replace("{expert}", str(expert))

    return Parameter(
        name=prefix + numbered(rule.megatron),
        shape=tuple(shape.size_of(dimension) for dimension in rule.shape),
        sharding=rule.sharding,
        blocks=rule.blocks(shape, lambda name: tensor_prefix + numbered(name)),
        layer=layer,
        expert=expert,
        sections=tuple(shape.recurrent_sections[section] for section in rule.sections),
        is_filter=rule.shape == ("filters", "filter_width"),
    )


def tensors_of(parameters: list[Parameter]) -> dict[str, tuple[int, ...]]:
    """Shapes of all Hugging Face tensors that the parameters consist of."""
    return {name: tensor_shape for parameter in parameters for name, tensor_shape in parameter.tensors.items()}
