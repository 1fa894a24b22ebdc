"""The cost model as measured on a machine: the file that ``tools/fit_cost_model.py`` writes and ``--cost-model`` reads.

A pass over a segment takes, forward and backward apart,

    seconds = max(layers * d + d', layers * (a tokens + b pairs) + a' tokens + c edges)

What the layers' number does not multiply happens once: embedding, logits, their gradients. The first, the floor, is
what the host takes to launch the pass, while the device computes what the second says. The file says for which model
it holds: any number of layers of the same shape, dtype and tensor parallelism. How many pipeline stages or replicas
share the work does not matter to what a segment costs. Another shape is refused, not scaled.

Bytes are those that one rank's tensors take (``segment_bytes``); a file that was made without a GPU has none.

Files of version 1, which do not say it, have fewer kinds of bytes: those that they lack are 0, and what they stand for
is in the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_dta.common.errors import InputError
from megatron_dta.common.files import read_json
from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.costs.segment_bytes import SegmentBytes

WHAT = "cost model"
VERSION = 2
# Bytes that files of version 1 do not have.
_SINCE_VERSION_2 = frozenset({"scores_per_token", "scores_per_pair", "most_scores", "kv_per_token", "fixed"})


@dataclass(frozen=True)
class CostShape:
    """What a measurement depends on, and must agree with the model that it is used for.

    Attributes:
        dtype: of weights and activations, "bfloat16" for example.
        tensor_model_parallel_size, sequence_parallel: how each layer is divided.
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


@dataclass(frozen=True)
class PassSeconds:
    """Coefficients of a forward, or of a backward; see the top of the file. None is negative.

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
    """What such a file says.

    Attributes:
        path: where it was read, for messages.
        shape: what it holds for.
        num_layers: layers of the model that it was made for.
        forward, backward: seconds.
        bytes: None if no GPU was measured.
    """

    path: str
    shape: CostShape
    num_layers: int
    forward: PassSeconds
    backward: PassSeconds
    bytes: SegmentBytes | None = None

    def model(self, num_layers: int | None = None, segment_tokens: int = CostModel.segment_tokens) -> CostModel:
        """The cost model of ``num_layers`` layers (None: of the model that was measured)."""
        layers = self.num_layers if num_layers is None else num_layers

        def total(name: str) -> tuple[float, float]:
            """Seconds of forward and backward together, and the forward's share."""
            seconds = [
                layers * getattr(each, f"{name}_and_layer", 0.0) + getattr(each, name, 0.0)
                for each in (self.forward, self.backward)
            ]
            return sum(seconds), seconds[0] / sum(seconds) if sum(seconds) else 0.5

        token, pair, edge, floor = (total(name) for name in ("token", "pair", "edge", "floor"))
        return CostModel(token[0], pair[0], edge[0], floor[0], segment_tokens, token[1], pair[1], edge[1], floor[1])

    def check(self, shape: CostShape) -> None:
        """Raise InputError unless the file holds for a model of ``shape``, naming the first difference."""
        for field in fields(CostShape):
            measured, needed = getattr(self.shape, field.name), getattr(shape, field.name)
            if measured != needed:
                name = "dtype" if field.name == "dtype" else "--" + field.name.replace("_", "-")
                raise InputError(
                    f"--cost-model {self.path}: was measured with {name} {measured}, but the model has {needed}; "
                    "measure this model with tools/fit_cost_model.py"
                )

    def as_json(self) -> dict[str, Any]:
        """What ``load_cost_file`` needs in a file."""
        return {
            "what": WHAT,
            "version": VERSION,
            "num_layers": self.num_layers,
            "shape": asdict(self.shape),
            "forward": asdict(self.forward),
            "backward": asdict(self.backward),
            "bytes": None if self.bytes is None else asdict(self.bytes),
        }


def load_cost_file(path: str | Path) -> CostFile:
    """Read and check a file; raises InputError with one line that names the file and what is wrong."""
    values = read_measured(path)
    for name in ("forward", "backward"):
        if isinstance(values.get(name), dict) and "segment_and_layer" in values[name]:
            raise InputError(
                f"{path}: was fitted in an older form; fit it again from its measurements: "
                f"tools/fit_cost_model.py --refit {path} --output FILE"
            )
    measured = values.get("bytes")
    optional = _SINCE_VERSION_2 if values.get("version", 1) == 1 else frozenset()
    found = CostFile(
        str(path),
        read_part(path, values, "shape", CostShape),
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
    """The values of a file of ``tools/fit_cost_model.py``, of which only what it is and its layers are checked."""
    values = _read(path)
    if values.get("what") != WHAT:
        raise InputError(f"{path}: is not a file of tools/fit_cost_model.py (its 'what' is not {WHAT!r})")
    version = values.get("version", 1)
    if isinstance(version, bool) or version not in (1, VERSION):
        raise InputError(f"{path}: is of version {version!r}, but this program reads up to {VERSION}; fit it again")
    layers = values.get("num_layers")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise InputError(f"{path}: field num_layers must be a whole number above 0, not {layers!r}")
    return values


def load_cost_model(path: str | Path, segment_tokens: int | None = None) -> tuple[CostModel, CostFile | None]:
    """The cost model of either kind of file: a measured one, or plain coefficients (``CostModel.load``).

    Args:
        segment_tokens: tokens of a full segment; None: the file's, or the default.
    """
    if _read(path).get("what") == WHAT:
        found = load_cost_file(path)
        return found.model(segment_tokens=segment_tokens or CostModel.segment_tokens), found
    return CostModel.load(path), None


def _read(path: str | Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold one JSON object")
    return values


def read_part(
    path: str | Path, values: Mapping[str, Any], name: str, kind: type, optional: frozenset[str] = frozenset()
) -> Any:
    """One object of a file as a dataclass of numbers (one sign: none is negative), flags and names.

    Args:
        optional: fields that keep their defaults where they are missing.
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
