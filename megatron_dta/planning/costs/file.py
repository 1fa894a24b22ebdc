"""Reads and writes a measured cost model: ``megatron-dta fit-cost-model`` writes the file, ``--cost-model`` reads it.

The forward of a segment takes (and its backward, with other coefficients)

    seconds = max(layers * d + d', layers * (a tokens + b pairs) + a' tokens + c edges)

The terms without ``layers`` happen once per pass: embedding, logits and their gradients. The first argument of ``max``,
the floor, is the time that the host needs to launch the pass while the device computes the second. A file is valid for
any number of layers of one layer shape, dtype, and tensor and expert parallelism. The numbers of pipeline stages and
replicas do not change the cost of a segment. Other shapes are refused, not scaled. Experts are grouped
(``--moe-grouped-gemm``), and either all layers have them or none.

Bytes are those of one rank's tensors (``segment_bytes``); a file that was made without a GPU has none. Files of version
1 have no version field and fewer kinds of bytes. The missing kinds are 0, and the others include them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_dta.common.errors import InputError
from megatron_dta.common.files import read_json
from megatron_dta.planning.costs.decoder_shape import DecoderShape
from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.costs.segment_bytes import SegmentBytes

WHAT = "cost model"
VERSION = 2
SHARED_WITH_DECODER = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "swiglu",
)
# Bytes that files of version 1 lack.
_SINCE_VERSION_2 = frozenset({"scores_per_token", "scores_per_pair", "most_scores", "kv_per_token", "fixed"})
# Sizes of experts, which files of models without them may lack.
_OF_EXPERTS = (
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
# Sizes of gated delta net and gated attention, which files of models without them may lack.
_OF_HYBRIDS = (
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "attention_output_gate",
)
# Set by a run; not in any file.
RUN_SETTINGS = frozenset({"kv_offload_fraction", "attention_share"})


@dataclass(frozen=True)
class CostShape:
    """The properties of a model on which a measurement depends; they must match the model that uses it.

    Attributes:
        dtype: dtype of weights and activations, for example "bfloat16".
        tensor_model_parallel_size, sequence_parallel: how each layer is divided.
        num_experts, moe_router_topk, moe_ffn_hidden_size, moe_shared_expert_intermediate_size: experts of a layer; 0
            without them.
        expert_model_parallel_size, expert_tensor_parallel_size: how experts are divided.
        linear_attention_freq, linear_conv_kernel_dim, ...: N for attention in every N-th layer, and the sizes of
            gated delta net in the others; 0 without it.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    swiglu: bool = True
    dtype: str = "bfloat16"
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    num_experts: int = 0
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    linear_attention_freq: int = 0
    linear_conv_kernel_dim: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    attention_output_gate: bool = False

    @classmethod
    def of(
        cls,
        shape: DecoderShape,
        dtype: str,
        tensor_size: int,
        sequence_parallel: bool,
        expert_ranks: tuple[int, int] = (1, 1),
    ) -> CostShape:
        """The properties of a decoder.

        Args:
            expert_ranks: ranks over which experts are divided, and ranks that share each expert.

        Raises:
            InputError: the layers with gated delta net do not follow each other like those of Qwen3-Next.
        """
        sizes = {name: getattr(shape, name) for name in SHARED_WITH_DECODER}
        if shape.num_experts is not None:
            sizes |= {name: getattr(shape, name) or 0 for name in _OF_EXPERTS[:4]}
            sizes["moe_ffn_hidden_size"] = shape.expert_width
            # All layers have experts, so the width of plain feed-forward layers does not matter.
            sizes["ffn_hidden_size"] = 1
            sizes |= dict(zip(_OF_EXPERTS[4:], expert_ranks, strict=True))
        if shape.linear_attention_layers:
            sizes |= {name: getattr(shape, name) for name in _OF_HYBRIDS[1:]}
            sizes["linear_attention_freq"] = period_of(shape)
        return cls(**sizes, dtype=dtype, tensor_model_parallel_size=tensor_size, sequence_parallel=sequence_parallel)

    def decoder(self, num_layers: int | None = None) -> DecoderShape:
        """A decoder of ``num_layers`` such layers, by default as few as have all kinds of them."""
        num_layers = num_layers or self.linear_attention_freq or 1
        sizes = {name: getattr(self, name) for name in SHARED_WITH_DECODER}
        if self.linear_attention_freq:
            sizes |= {name: getattr(self, name) for name in _OF_HYBRIDS[1:]}
            layers = tuple((layer + 1) % self.linear_attention_freq != 0 for layer in range(num_layers))
            sizes["linear_attention_layers"] = layers
        if self.num_experts:
            sizes |= dict(num_experts=self.num_experts, moe_router_topk=self.moe_router_topk, moe_grouped_gemm=True)
            sizes |= dict(moe_ffn_hidden_size=self.moe_ffn_hidden_size)
            sizes |= dict(moe_shared_expert_intermediate_size=self.moe_shared_expert_intermediate_size or None)
        return DecoderShape(num_layers, **sizes)


def period_of(shape: DecoderShape) -> int:
    """The N of a decoder with attention in every N-th layer only; raises InputError for any other decoder."""
    layers = shape.linear_attention_layers
    period = layers.index(False) + 1 if False in layers else 0
    if not period or layers != tuple((layer + 1) % period != 0 for layer in range(len(layers))) or len(layers) % period:
        raise InputError(
            "--cost-model: a cost holds for the mean of all layers, so gated delta net needs attention in every N-th "
            "layer (--linear-attention-freq N) and whole groups of N layers; leave it out"
        )
    return period


@dataclass(frozen=True)
class PassSeconds:
    """Coefficients of a forward or of a backward, as in the module's formula; none is negative.

    Attributes:
        token_and_layer, pair_and_layer, token, edge: a, b, a', c.
        floor_and_layer, floor: d, d'.
    """

    token_and_layer: float = 0.0
    pair_and_layer: float = 0.0
    token: float = 0.0
    edge: float = 0.0
    floor_and_layer: float = 0.0
    floor: float = 0.0


@dataclass(frozen=True)
class CostFile:
    """The contents of a cost file.

    Attributes:
        path: path of the file, for messages.
        shape: model shape for which it is valid.
        num_layers: number of layers of the measured model.
        forward, backward: coefficients of the seconds.
        bytes: bytes of a rank; None if no GPU was measured.
    """

    path: str
    shape: CostShape
    num_layers: int
    forward: PassSeconds
    backward: PassSeconds
    bytes: SegmentBytes | None = None

    def model(self, num_layers: int | None = None, segment_tokens: int = CostModel.segment_tokens) -> CostModel:
        """The cost model for ``num_layers`` layers, or for the measured model's number if None."""
        layers = self.num_layers if num_layers is None else num_layers

        def passes(name: str) -> list[float]:
            """Seconds of the forward and of the backward."""
            return [
                layers * getattr(each, f"{name}_and_layer", 0.0) + getattr(each, name, 0.0)
                for each in (self.forward, self.backward)
            ]

        return CostModel.of_passes(*map(passes, ("token", "pair", "edge", "floor")), segment_tokens)

    def check(self, shape: CostShape) -> None:
        """Raise InputError, naming the first difference, unless the file is valid for a model of ``shape``."""
        for field in fields(CostShape):
            measured, needed = getattr(self.shape, field.name), getattr(shape, field.name)
            if measured != needed:
                name = "dtype" if field.name == "dtype" else "--" + field.name.replace("_", "-")
                raise InputError(
                    f"--cost-model {self.path}: was measured with {name} {measured}, but the model has {needed}; "
                    "measure this model with megatron-dta fit-cost-model"
                )

    def as_json(self) -> dict[str, Any]:
        """The JSON object that ``load_cost_file`` reads."""
        return {
            "what": WHAT,
            "version": VERSION,
            "num_layers": self.num_layers,
            "shape": asdict(self.shape),
            "forward": asdict(self.forward),
            "backward": asdict(self.backward),
            "bytes": None if self.bytes is None else _measured(self.bytes),
        }


def _measured(of: SegmentBytes) -> dict[str, float]:
    return {name: value for name, value in asdict(of).items() if name not in RUN_SETTINGS}


def load_cost_file(path: str | Path) -> CostFile:
    """Read and check a file; raises InputError with one line that names the file and what is wrong."""
    values = read_measured(path)
    for name in ("forward", "backward"):
        if isinstance(values.get(name), dict) and "segment_and_layer" in values[name]:
            raise InputError(
                f"{path}: was fitted in an older form; fit it again from its measurements: "
                f"megatron-dta fit-cost-model --refit {path} --output FILE"
            )
    measured = values.get("bytes")
    optional = (
        RUN_SETTINGS | {"spread_per_token"} | (_SINCE_VERSION_2 if values.get("version", 1) == 1 else frozenset())
    )
    found = CostFile(
        str(path),
        read_shape(path, values),
        values["num_layers"],
        read_part(path, values, "forward", PassSeconds),
        read_part(path, values, "backward", PassSeconds),
        None if measured is None else read_part(path, values, "bytes", SegmentBytes, optional),
    )
    try:
        found.model()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return found


def read_measured(path: str | Path) -> dict[str, Any]:
    """Read a file of ``megatron-dta fit-cost-model``; only its kind, version and number of layers are checked."""
    values = _read(path)
    if values.get("what") != WHAT:
        raise InputError(f"{path}: is not a file of megatron-dta fit-cost-model (its 'what' is not {WHAT!r})")
    version = values.get("version", 1)
    if isinstance(version, bool) or version not in (1, VERSION):
        raise InputError(f"{path}: is of version {version!r}, but this program reads up to {VERSION}; fit it again")
    layers = values.get("num_layers")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise InputError(f"{path}: field num_layers must be a whole number above 0, not {layers!r}")
    return values


def read_shape(path: str | Path, values: Mapping[str, Any]) -> CostShape:
    """Read the field ``shape`` of a file."""
    return read_part(path, values, "shape", CostShape, frozenset(_OF_EXPERTS + _OF_HYBRIDS))


def load_cost_model(path: str | Path) -> tuple[CostModel, CostFile | None]:
    """Load the cost model of either kind of file: a measured one, or plain coefficients (``CostModel.load``)."""
    if _read(path).get("what") == WHAT:
        found = load_cost_file(path)
        return found.model(segment_tokens=CostModel.segment_tokens), found
    return CostModel.load(path), None


def _read(path: str | Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold one JSON object")
    return values


def read_part(
    path: str | Path, values: Mapping[str, Any], name: str, kind: type, optional: frozenset[str] = frozenset()
) -> Any:
    """Read one object of a file as a dataclass of nonnegative numbers, flags and names.

    Args:
        optional: fields that may be missing and then keep their defaults.
    """
    given = values.get(name)
    if not isinstance(given, dict):
        raise InputError(f"{path}: field {name!r} must be an object")
    defaults, found = {field.name: field.default for field in fields(kind)}, {}
    for key in given:
        if key not in defaults:
            raise InputError(f"{path}: field {name}.{key} is not known; the fields are {', '.join(defaults)}")
    for field in fields(kind):
        if field.name not in given and field.name in optional:
            continue
        if field.name not in given:
            raise InputError(f"{path}: field {name}.{field.name} is missing")
        value, expected = given[field.name], field.type
        if expected in ("bool", "str"):
            valid = isinstance(value, bool if expected == "bool" else str)
        else:
            kinds = int if expected == "int" else (int, float)
            valid = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        if not valid:
            wanted = {"bool": "true or false", "str": "a name", "int": "a whole number not below 0"}
            kind_name = wanted.get(expected, "a number not below 0")
            raise InputError(f"{path}: field {name}.{field.name} must be {kind_name}, not {value!r}")
        found[field.name] = value
    return kind(**found)
