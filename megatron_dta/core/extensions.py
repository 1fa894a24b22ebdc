"""What the engine takes from extras. An extension is empty until something provides it.

``megatron_dta.wiring.attach.attach_extras()`` provides all three. The programs call it; a loop of one's own that uses
an extra calls it before it builds its model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from megatron_dta.core.common.errors import InputError

Part = TypeVar("Part")


class Extension(Generic[Part]):
    """A part of the engine that an extra supplies.

    Args:
        need: what of a run needs it, for the error message.
        extra: the package that has it.
    """

    def __init__(self, need: str, extra: str) -> None:
        self._need, self._extra = need, extra
        self._provider: Callable[[], Part] | None = None

    def provide(self, provider: Callable[[], Part]) -> None:
        """Set what returns the part; it is called when the part is used."""
        self._provider = provider

    @property
    def part(self) -> Part:
        """The part; ``InputError`` if nothing provides it."""
        if self._provider is None:
            raise InputError(
                f"{self._need} needs megatron_dta.extras.{self._extra}: call megatron_dta.wiring.attach.attach_extras()"
            )
        return self._provider()


class KVOnHost(Protocol):
    """Host memory for the K/V slots of a share of the layers."""

    fraction: float

    def pool(self, chunk: int, **sizes: Any) -> Any:
        """The pool of a model chunk; ``sizes`` are those of ``KVPool``."""


@dataclass(frozen=True)
class ExpertParallel:
    """Experts on several ranks.

    Attributes:
        row_exchange: (process group, rows of this rank, most rows of any rank, ``sum_rows``) -> the exchange of a pass.
        synchronize: (step plan, pipeline shape) -> the plan with the same ops on all ranks of the shape's group.
        group_step: predicts the steps of ranks that share experts, for the partition.
    """

    row_exchange: Callable[..., Any]
    synchronize: Callable[..., Any]
    group_step: Callable[..., Any]


@dataclass(frozen=True)
class TransformerEngine:
    """Transformer Engine's layers.

    Attributes:
        use_layers: puts them into a block's spec.
        weights_quantized_once: (model chunks) -> a context in which no weight changes.
    """

    use_layers: Callable[..., None]
    weights_quantized_once: Callable[..., Any]


EXPERT_PARALLEL = Extension[ExpertParallel](
    "a step in which ranks run the same ops (they share experts, or reduce gradients in the backward)",
    "expert_parallel",
)
KV_OFFLOAD = Extension[Callable[..., KVOnHost]]("--kv-offload-fraction", "kv_offload")
TRANSFORMER_ENGINE = Extension[TransformerEngine]("--transformer-impl transformer_engine", "transformer_engine")
