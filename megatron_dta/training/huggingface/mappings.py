"""Maps Hugging Face tensors to Megatron parameters with one table of rules per architecture.

Names in a rule are relative to the layer; ``{expert}`` stands for an expert's number. All code that reads or writes
weights uses the result of ``parameters_of``, so a new architecture needs only a new table. Megatron's names are those
of its local layer specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.families import FOLDERS, part_of
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.training.huggingface.parameters import (
    PREFIX,
    Block,
    Parameter,
    Sharding,
    concatenated_blocks,
    head_group_blocks,
)


@dataclass(frozen=True)
class ModelShape(DecoderShape):
    """The sizes that determine the names and shapes of a model's weights."""

    make_vocab_size_divisible_by: int = 1

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Rows of the padded embedding with ``tensor_size`` tensor-parallel ranks."""
        unit = self.make_vocab_size_divisible_by * tensor_size
        return -(-self.vocab_size // unit) * unit

    def size_of(self, dimension: str) -> int:
        """The size of a dimension that the tables name."""
        shared = self.moe_shared_expert_intermediate_size or 0
        sizes = {
            "hidden": self.hidden_size,
            "head": self.kv_channels,
            "query": self.query_width,
            "query_key_value": self.query_width + 2 * self.kv_width,
            "gated_query_key_value": 2 * (self.query_width + self.kv_width),
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
        if dimension in sizes:
            return sizes[dimension]
        return part_of(self.mixer.kind, "huggingface").dimensions(self.mixer)[dimension]


class Place(Enum):
    """The part of a model that a rule applies to."""

    EMBEDDING = "before the layers"
    LAYER = "every layer"
    ATTENTION = "layers with attention"
    MIXER = "layers with the mixer that is not attention"
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
        sections: dimensions that ranks divide one by one.
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


def query_key_value(kind: str, dimensions: tuple[str, ...]) -> Rule:
    tensors = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return Rule(Place.ATTENTION, f"self_attention.linear_qkv.{kind}", tensors, dimensions, Sharding.ROWS)


def feed_forward(part: Place, megatron: str, gate: str, up: str, down: str, width: str, gate_up: str) -> list[Rule]:
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
    Rule(Place.LAYER, "input_layernorm.weight", ("input_layernorm.weight",), ("hidden",)),
    query_key_value("weight", ("query_key_value", "hidden")),
    Rule(
        Place.ATTENTION,
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight",),
        ("hidden", "query"),
        Sharding.COLUMNS,
    ),
    Rule(Place.LAYER, "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), ("hidden",)),
]
QUERY_KEY_VALUE_BIAS = [query_key_value("bias", ("query_key_value",))]
QUERY_KEY_NORM = [
    Rule(Place.ATTENTION, "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("head",)),
    Rule(Place.ATTENTION, "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("head",)),
]


DENSE = feed_forward(Place.DENSE, "mlp.", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "feed_forward", "gate_up")


def mixture(module: str, gate: str, up: str, down: str) -> list[Rule]:
    router = Rule(Place.MIXTURE, "mlp.router.weight", (f"{module}.gate.weight",), ("experts", "hidden"))
    expert = module + ".experts.{expert}."
    names = (expert + gate, expert + up, expert + down)
    return [
        router,
        *feed_forward(Place.EXPERT, "mlp.experts.local_experts.{expert}.", *names, "expert", "expert_gate_up"),
    ]


def shared_experts(module: str) -> list[Rule]:
    names = (f"{module}.{part}_proj" for part in ("gate", "up", "down"))
    return feed_forward(Place.MIXTURE, "mlp.shared_experts.", *names, "shared_experts", "shared_gate_up")


ARCHITECTURES: dict[str, list[Rule]] = {
    "LlamaForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *DENSE],
    "MistralForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *DENSE],
    "MixtralForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *mixture("block_sparse_moe", "w1", "w3", "w2")],
    "Qwen2ForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *QUERY_KEY_VALUE_BIAS, *DENSE],
    "Qwen3ForCausalLM": [*OUTSIDE_LAYERS, *ATTENTION, *QUERY_KEY_NORM, *DENSE],
    "Qwen3MoeForCausalLM": [
        *OUTSIDE_LAYERS,
        *ATTENTION,
        *QUERY_KEY_NORM,
        *DENSE,
        *mixture("mlp", "gate_proj", "up_proj", "down_proj"),
    ],
}


def rules_of(architecture: str) -> list[Rule]:
    """The table of an architecture.

    Raises:
        InputError: the architecture is not supported.
    """
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    for kind, names in FOLDERS.items():
        if architecture in names:
            return part_of(kind, "huggingface").RULES[architecture]
    known = ", ".join([*ARCHITECTURES, *chain(*FOLDERS.values())])
    raise InputError(f"the architecture {architecture} cannot be converted; supported are {known}")


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
    # A table may name tensors that some models of the architecture lack.
    rules = [rule for rule in rules if rule.part is Place.EMBEDDING or all(map(shape.size_of, rule.shape))]
    parameters = [_parameter(rule, shape) for rule in rules if rule.part is Place.EMBEDDING]
    for layer in range(shape.num_layers):
        mixture = shape.moe_layers[layer]
        attention = Place.MIXER if shape.has_mixer(layer) else Place.ATTENTION
        kinds = {Place.LAYER}
        kinds |= {attention} if shape.mixes(layer) else set()
        kinds |= {Place.MIXTURE if mixture else Place.DENSE} if shape.feeds_forward(layer) else set()
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
        sections=tuple(map(shape.size_of, rule.sections)),
        is_filter="filter_width" in rule.shape,
    )


def tensors_of(parameters: list[Parameter]) -> dict[str, tuple[int, ...]]:
    """Shapes of all Hugging Face tensors that the parameters consist of."""
    return {name: tensor_shape for parameter in parameters for name, tensor_shape in parameter.tensors.items()}
