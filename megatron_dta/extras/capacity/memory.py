"""Predicts the GPU memory of a rank, by part.

weights        parameters of the rank
gradients      Megatron's gradient buffer
optimizer      master weights and Adam's two moments; the distributed optimizer divides them over the replicas
keys_values    K and V of the tokens in flight, and the float32 accumulators of their gradients
activations    tensors saved for the backward of in-flight tokens whose activations are kept, and of the running segment
logits         the logit chunk that exists at a time, and its gradient
workspace      temporary memory of the running segment, messages, and a fixed amount for the CUDA context, NCCL and the
               allocator

The formulas of bytes are in ``core.planning.costs``: of a token in ``segment_bytes``, of a parameter's states in
``element_bytes``, of a plan's ops in ``memory_budget``. This module divides them over a mesh and adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.element_bytes import DTYPE_BYTES, LOGIT_ELEMENTS, optimizer_bytes
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.shapes.decoder import DecoderShape, RankParameters
from megatron_dta.core.shapes.run_mesh import RunMesh

# CUDA context, NCCL buffers, and the workspaces of cuBLAS and Triton.
FIXED_BYTES = 2.0 * GIB
# Bytes of a logit with its gradient.
LOGIT_BYTES = 4.0


@dataclass(frozen=True)
class StateSettings:
    """Data types and placement of weights, gradients, optimizer states and activations.

    Attributes:
        weights, main_grads, main_params, exp_avg, exp_avg_sq: dtypes, "fp32", "bf16", "fp16" or "fp8".
        optimizer: whether there is an optimizer; a benchmark of a step has none.
        distributed_optimizer: whether the replicas divide the optimizer states.
        offload_fraction: share of the optimizer states on the host.
        kv_offload_fraction: share of the layers whose K/V slots are on the host.
        full_recompute: whether each layer is recomputed (``--recompute-granularity full``).
    """

    weights: str = "bf16"
    main_grads: str = "fp32"
    main_params: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    optimizer: bool = True
    distributed_optimizer: bool = True
    offload_fraction: float = 0.0
    full_recompute: bool = False
    kv_offload_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("weights", "main_grads", "main_params", "exp_avg", "exp_avg_sq"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise InputError(f"{name} {getattr(self, name)!r}: choose one of {', '.join(DTYPE_BYTES)}")
        if not 0 <= self.offload_fraction <= 1:
            raise InputError(f"--optimizer-offload-fraction {self.offload_fraction}: must be from 0 to 1")
        if not 0 <= self.kv_offload_fraction <= 1:
            raise InputError(f"--kv-offload-fraction {self.kv_offload_fraction}: must be from 0 to 1")
        if self.offload_fraction and {self.main_params, self.exp_avg, self.exp_avg_sq} != {"fp32"}:
            raise InputError("--optimizer-offload-fraction: offloaded states are float32; leave their dtypes out")

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer states per parameter."""
        dtypes = self.main_params, self.exp_avg, self.exp_avg_sq
        return optimizer_bytes(DTYPE_BYTES[self.weights], *dtypes) if self.optimizer else 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank, by the parts of the module's docstring. ``host`` is not on the GPU."""

    weights: float
    gradients: float
    optimizer: float
    keys_values: float
    activations: float
    logits: float
    workspace: float
    host: float = 0.0

    def parts(self) -> dict[str, float]:
        """Bytes of each part on the GPU."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "host"}

    @property
    def total(self) -> float:
        """Bytes on the GPU."""
        return sum(self.parts().values())


@lru_cache(maxsize=4096)
def counted_bytes(
    shape: DecoderShape, mesh: RunMesh, states: StateSettings, layers: Sequence[int] | None = None
) -> SegmentBytes:
    """Count the bytes of a token on a rank, without logits; figures per layer are means over its ``layers`` (a range
    or tuple, None for all).
    """
    rank = RankTensors(
        DTYPE_BYTES[states.weights],
        mesh.tensor,
        mesh.sequence_parallel,
        expert_ranks=mesh.experts,
        context_size=mesh.context,
        expert_tensor_size=mesh.expert_tensor,
        kv_offload_fraction=states.kv_offload_fraction,
    )
    # Fixed bytes are in FIXED_BYTES.
    counted = replace(SegmentBytes.of_shape(shape, rank, layers), work_fixed=0.0, fixed=0.0)
    if not states.full_recompute:
        return counted
    # Each layer keeps its input, and holds its activations while it is recomputed.
    held = counted.kept_per_token_and_layer + counted.spread_per_token
    return replace(
        counted,
        kept_per_token_and_layer=counted.input_per_token,
        work_per_token=counted.work_per_token + held,
        spread_per_token=0.0,
    )


@dataclass(frozen=True)
class InFlight:
    """Peak of a step's segments on a stage.

    Attributes:
        tokens: in-flight tokens in each model chunk of the stage.
        kept: in-flight tokens whose activations are kept; None for all.
        segment, path: tokens of the longest segment, and of the longest root path.
        peak_bytes: peak bytes of keys, values, activations and workspace of a plan (``segment_bytes.peak_bytes``);
            None to use the upper bound that follows from the tokens.
    """

    tokens: float
    segment: float
    path: float
    kept: float | None = None
    peak_bytes: float | None = None


def stage_memory(
    shape: DecoderShape,
    mesh: RunMesh,
    states: StateSettings,
    stage: int,
    flight: InFlight,
    segment_bytes: SegmentBytes | None = None,
) -> RankMemory:
    """Predict the memory of a rank of ``stage``; ``segment_bytes``: bytes per token, None for ``counted_bytes``."""
    segment_bytes = segment_bytes or counted_bytes(shape, mesh, states, tuple(mesh.stage_layers(stage)))
    parameters = rank_parameters(shape, mesh, stage)
    state = float(states.optimizer_bytes) * parameters.total
    if states.distributed_optimizer:
        state = states.optimizer_bytes * state_parameters(mesh, parameters)
    num_layers, logits, once = len(mesh.stage_layers(stage)), 0.0, 0.0
    if (len(mesh.layers) - 1) % mesh.pipeline == stage:
        once = segment_bytes.kept_per_token
        rows = max(1, LOGIT_ELEMENTS["cuda"] // shape.vocab_size)
        rows = min(rows, flight.segment / mesh.context)
        logits = rows * shape.vocab_size / mesh.tensor * LOGIT_BYTES
    of_token = replace(segment_bytes, kept_per_token=once).kept(num_layers)
    kept = flight.tokens if flight.kept is None else min(flight.kept, flight.tokens)
    work = float(segment_bytes.work(flight.segment, flight.path))
    keys_values = flight.tokens * segment_bytes.slot(num_layers)
    kv_on_host = flight.tokens * segment_bytes.host_slot(num_layers)
    if flight.peak_bytes is None:
        activations = kept * of_token + (flight.tokens - kept) * segment_bytes.input_per_token
        if kept < flight.tokens:
            activations += flight.segment * of_token  # The segment being recomputed holds its own.
    else:
        activations = max(0.0, flight.peak_bytes - keys_values - work)
    messages = 0.0 if mesh.pipeline == 1 else 2.0 * flight.segment * segment_bytes.input_per_token
    offloaded = states.offload_fraction * state
    return RankMemory(
        weights=parameters.total * DTYPE_BYTES[states.weights],
        gradients=parameters.total * DTYPE_BYTES[states.main_grads],
        optimizer=state - offloaded,
        keys_values=keys_values,
        activations=activations,
        logits=logits,
        workspace=FIXED_BYTES + work + messages,
        # Includes the gradients that the host uses for the update.
        host=kv_on_host + (offloaded * (1 + 4 / states.optimizer_bytes) if offloaded else 0.0),
    )


@lru_cache(maxsize=4096)
def rank_parameters(shape: DecoderShape, mesh: RunMesh, stage: int) -> RankParameters:
    total = RankParameters(0)
    for v in range(stage, len(mesh.layers), mesh.pipeline):
        total += shape.stage_parameters(mesh.layers, v, mesh.tensor, mesh.experts, mesh.expert_tensor)
    return total


def state_parameters(mesh: RunMesh, parameters: RankParameters) -> float:
    """Number of parameters whose optimizer states a rank holds with the distributed optimizer."""
    return parameters.dense / mesh.copies + parameters.experts / max(1, mesh.expert_replicas)
