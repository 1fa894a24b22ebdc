"""What planning, checks and the model ask of a layer that mixes tokens otherwise than plain attention does.

Each kind of layer derives its ``Sizes`` from ``Mixer``, in a folder of its own (``core.families``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple


class LayerBytes(NamedTuple):
    """Bytes of a token in a layer: kept until the backward, and in use during the backward."""

    kept: float
    work: float


class LayerSizes(NamedTuple):
    """What the bytes of a layer depend on besides the shape, for one token on one rank.

    Attributes:
        element_bytes, tensor_size: as in ``RankTensors``.
        hidden: channels of the hidden states.
        ffn: bytes that the feed-forward layer keeps, and its working memory.
    """

    element_bytes: int
    tensor_size: int
    hidden: float
    ffn: tuple[float, float]


@dataclass(frozen=True)
class Mixer:
    """The sizes of a kind of layer.

    Attributes:
        kind: name of its folder.
        is_recurrent: whether it keeps states at forks; otherwise it keeps keys and values as attention does.
    """

    kind: ClassVar[str]
    is_recurrent: ClassVar[bool] = True

    @property
    def settings(self) -> dict[str, Any]:
        """What ``core.families.mixer_of`` restores it from."""
        return {"kind": self.kind, **asdict(self)}

    def projections(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of its linear layers, which can have adapters, by name."""
        raise NotImplementedError

    def weights(self, hidden_size: int) -> int:
        """Entries of its matrices."""
        return sum(inputs * outputs for inputs, outputs in self.projections(hidden_size).values())

    @property
    def vectors(self) -> tuple[int, int]:
        """Parameters besides the matrices: those that tensor ranks divide, and those that they all hold."""
        raise NotImplementedError

    def heads_refusal(self, tensor: int, context: int) -> str | None:
        """Why tensor and context ranks cannot divide it; None if they can."""
        raise NotImplementedError

    def check(self, model: Any, parallel: Any) -> None:
        """Raise ``InputError`` where ``ModelConfig`` or ``ParallelConfig`` conflict with it."""
        raise NotImplementedError

    def layer_bytes(self, sizes: LayerSizes) -> LayerBytes:
        """Bytes of a token in a layer of this kind on the kernels, its feed-forward part included."""
        raise NotImplementedError

    # Of kinds without a recurrence.

    @property
    def slot(self) -> int | None:
        """Channels of the one row that a pool keeps of a token, on every tensor rank, in place of keys and values."""
        return None

    @property
    def rotated_channels(self) -> int | None:
        """Channels of a head with rotary positions; None for the share that ``rotary_percent`` says."""
        return None

    @property
    def pair_width(self) -> float:
        """Mean of the channels of all queries and of all outputs: what a pair of tokens takes in attention."""
        return 0

    @property
    def expansion(self) -> int:
        """Matrix entries that each token on a segment's path is multiplied with once more, in every segment."""
        return 0

    def heads_at_once(self, path_tokens: int, num_heads: int, element_bytes: int) -> int:
        """How many of a rank's heads attend to a path at a time."""
        return num_heads

    def path_bytes(self, element_bytes: int, tensor_size: int, tokens: Any) -> Any:
        """Working memory of segments for the ``tokens`` on their paths, a number or an array."""
        return 0

    # Of kinds with a recurrence.

    @property
    def state(self) -> int:
        """Numbers in a state."""
        return 0

    @property
    def rows(self) -> tuple[int, int]:
        """Rows before the convolution that a fork keeps, and their channels."""
        return 0, 0

    @property
    def token_operations(self) -> int:
        """Operations of a token's forward, without products with weights."""
        return 0

    @property
    def exchanged(self) -> tuple[int, int]:
        """Channels of a token that context ranks exchange: inputs of the recurrence, and its output."""
        return 0, 0
