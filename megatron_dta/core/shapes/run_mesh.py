"""The sizes of a run's process groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunMesh:
    """Sizes of the process groups of a run.

    Attributes:
        tensor, pipeline, chunks, experts: tensor parallelism, pipeline stages, model chunks per stage, expert
            parallelism.
        data: replicas of the model.
        expert_tensor: tensor parallelism of the experts.
        sequence_parallel: whether norms and residuals are divided along the sequence.
        layers: layers of each virtual stage.
        context: ranks that divide the tokens of a segment.
    """

    tensor: int
    pipeline: int
    data: int
    layers: tuple[int, ...]
    chunks: int = 1
    experts: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same weights outside experts, whose gradients are summed."""
        return self.context * self.data

    @property
    def synchronized_replicas(self) -> int:
        """Number of replicas that run the same ops at the same time, because they share experts."""
        return max(1, self.experts * self.expert_tensor // (self.tensor * self.context))

    @property
    def expert_replicas(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.tensor * self.copies // (self.experts * self.expert_tensor)

    def stage_layers(self, stage: int) -> list[int]:
        """Indices (from 0) of the layers of a stage."""
        first = [sum(self.layers[:v]) for v in range(len(self.layers))]
        virtual_stages = range(stage, len(self.layers), self.pipeline)
        return [layer for v in virtual_stages for layer in range(first[v], first[v] + self.layers[v])]
