"""Maps Hugging Face tensors to Megatron parameters with one table of rules per architecture.

Names in a rule are relative to the layer; ``{expert}`` stands for an expert's number. All code that reads or writes
weights uses the result of ``parameters_of``, so a new architecture needs only a new table. Megatron's names are those
of its local layer specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from megatron_dta.common.errors import InputError
from megatron_dta.config import ModelConfig
from megatron_dta.conversion.parameters import (
    Block,
    Parameter,
    Sharding,
    StoredAt,
    head_group_blocks,
    plain_blocks,
    stacked_blocks,
)


@dataclass(frozen=True)
class ModelShape:
    """The settings that determine the names and shapes of a model's weights, under the settings' names."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    untie_embeddings_and_output_weights: bool = False
    make_vocab_size_divisible_by: int = 1
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_layers: tuple[bool, ...] = ()

    @classmethod
    def of(cls, model: ModelConfig) -> ModelShape:
        """The shape of the model with these settings."""
        values = {item.name: getattr(model, item.name) for item in fields(cls) if hasattr(model, item.name)}
        return cls(**{**values, "moe_layers": tuple(values.get("moe_layers", ()))})

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Rows of the padded embedding with ``tensor_size`` tensor-parallel ranks."""
        unit = self.make_vocab_size_divisible_by * tensor_size
        return -(-self.vocab_size // unit) * unit

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        return bool(self.num_experts) and self.moe_layers[layer]

    def size_of(self, dimension: str) -> int:
        """The size of a dimension that the tables name."""
        heads, groups, head = self.num_attention_heads, self.num_query_groups, self.kv_channels
        sizes = {
            "hidden": self.hidden_size,
            "head": head,
            "query": heads * head,
            "query_key_value": (heads + 2 * groups) * head,
            "feed_forward": self.ffn_hidden_size,
            "gate_up": 2 * self.ffn_hidden_size,
            "expert": self.moe_ffn_hidden_size or self.ffn_hidden_size,
            "expert_gate_up": 2 * (self.moe_ffn_hidden_size or self.ffn_hidden_size),
            "experts": self.num_experts or 0,
            "vocabulary": self.vocab_size,
        }
        return sizes[dimension]


class Place(Enum):
    """The part of a model that a rule applies to."""

    EMBEDDING = "before the layers"
    LAYER = "every layer"
    DENSE = "layers without experts"
    MIXTURE = "layers with experts"
    EXPERT = "every expert of a layer"
    END = "behind the layers"
    OUTPUT = "after the layers, if the output weight is not the embedding"


@dataclass(frozen=True)
class Rule:
    """The parameter ``megatron`` with the dimensions ``shape`` consists of the tensors ``huggingface``.

    Attributes:
        key: the parameter's name in checkpoints, if it differs.
    """

    place: Place
    megatron: str
    huggingface: tuple[str, ...]
    shape: tuple[str, ...]
    sharding: Sharding = Sharding.WHOLE
    key: str | None = None

    def blocks(self, shape: ModelShape, rename: Callable[[str], str]) -> tuple[Block, ...]:
        """The blocks of the parameter; ``rename`` completes the tensors' names."""
        names, rows = tuple(rename(name) for name in self.huggingface), shape.size_of(self.shape[0])
        if len(names) == 1:
            return plain_blocks(names[0], rows)
        if len(names) == 3:
            per_group = shape.num_attention_heads // shape.num_query_groups
            return head_group_blocks(names, shape.num_query_groups, per_group, shape.kv_channels)
        return stacked_blocks(names, rows)


def _query_key_value(kind: str, dimensions: tuple[str, ...]) -> Rule:
    tensors = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return Rule(Place.LAYER, f"self_attention.linear_qkv.{kind}", tensors, dimensions, Sharding.ROWS)


def _feed_forward(place: Place, megatron: str, gate: str, up: str, down: str, width: str, gate_up: str) -> list[Rule]:
    first, second = (f"{megatron}linear_fc{number}.weight" for number in (1, 2))
    key = megatron.replace("local_experts.{expert}.", "experts.")
    keys = tuple(f"{key}linear_fc{number}.weight" for number in (1, 2))
    both = (f"{gate}.weight", f"{up}.weight")
    return [
        Rule(place, first, both, (gate_up, "hidden"), Sharding.GATED_ROWS, keys[0]),
        Rule(place, second, (f"{down}.weight",), ("hidden", width), Sharding.COLUMNS, keys[1]),
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
        key="self_attention.linear_qkv.layer_norm_weight",
    ),
    _query_key_value("weight", ("query_key_value", "hidden")),
    Rule(
        Place.LAYER,
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
        key="mlp.linear_fc1.layer_norm_weight",
    ),
]
QUERY_KEY_VALUE_BIAS = [_query_key_value("bias", ("query_key_value",))]
QUERY_KEY_NORM = [
    Rule(Place.LAYER, "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("head",)),
    Rule(Place.LAYER, "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("head",)),
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
}
# Buffers that old versions of transformers saved and newer ones compute. They are not converted.
COMPUTED_TENSORS = ("rotary_emb.inv_freq",)


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


def parameters_of(architecture: str, shape: ModelShape) -> list[Parameter]:
    """All parameters of the whole model, in the order of the forward pass."""
    rules = rules_of(architecture)
    parameters = [_parameter(rule, shape) for rule in rules if rule.place is Place.EMBEDDING]
    for layer in range(shape.num_layers):
        mixture = shape.has_experts(layer)
        places = {Place.LAYER, Place.MIXTURE if mixture else Place.DENSE}
        parameters += [_parameter(rule, shape, layer) for rule in rules if rule.place in places]
        for expert in range(shape.num_experts or 0) if mixture else ():
            parameters += [_parameter(rule, shape, layer, expert) for rule in rules if rule.place is Place.EXPERT]
    ends = {Place.END} | ({Place.OUTPUT} if shape.untie_embeddings_and_output_weights else set())
    return parameters + [_parameter(rule, shape) for rule in rules if rule.place in ends]


def _parameter(rule: Rule, shape: ModelShape, layer: int | None = None, expert: int | None = None) -> Parameter:
    prefix = "" if layer is None else f"decoder.layers.{layer}."
    tensor_prefix = "" if layer is None else f"model.layers.{layer}."
    name = rule.key or rule.megatron
    experts = [] if expert is None else [(expert, shape.num_experts or 0)]
    places = [_stored_at(prefix + name, experts)]
    if layer is not None:
        # Megatron stacks the parameters of all layers in one tensor unless layers differ, as with experts.
        joined = _stored_at(f"decoder.layers.{name}", [(layer, shape.num_layers), *experts])
        places.insert(1 if shape.num_experts else 0, joined)

    def numbered(name: str) -> str:
        return name.replace("{expert}", str(expert))

    return Parameter(
        name=prefix + numbered(rule.megatron),
        shape=tuple(shape.size_of(dimension) for dimension in rule.shape),
        sharding=rule.sharding,
        blocks=rule.blocks(shape, lambda name: tensor_prefix + numbered(name)),
        layer=layer,
        expert=expert,
        places=tuple(places),
    )


def _stored_at(key: str, axes: list[tuple[int, int]]) -> StoredAt:
    return StoredAt(key, tuple(index for index, _ in axes), tuple(count for _, count in axes))


def tensors_of(parameters: list[Parameter]) -> dict[str, tuple[int, ...]]:
    """Shapes of all Hugging Face tensors that the parameters consist of."""
    return {name: tensor_shape for parameter in parameters for name, tensor_shape in parameter.tensors.items()}
