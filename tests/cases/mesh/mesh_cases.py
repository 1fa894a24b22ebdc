"""Training steps on meshes, compared with one process that trains each sequence alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.parity import compare_outcomes, run_stock
from megatron_dta.extras.parity.outcome import Outcome
from mesh_worker import MeshCase, RankResult, run_cases, run_on_ranks
from tree_engine_cases import TEMPERATURE, tree_config, weights_of
from weight_shards import join_shards

GRPO = {"objective": "grpo", "kl_loss_coef": 0.05, "entropy_coef": 0.02, "dual_clip": 3.0}
FULL_RECOMPUTE = {"recompute_granularity": "full"}
# (mode, tokens of a segment, in-flight tokens kept): odd segments that sequence parallelism must fill up.
CUTS = {
    "dense": ("dense", 9, None), "dense-recomputed": ("dense", 9, 0), "packed": ("packed", 45, None),
    "packed-recomputed": ("packed", 45, 0), "dta": ("dta", 6, None), "dta-mixed": ("dta", 7, 12),
    "dta-recomputed": ("dta", 9, 0),
}  # fmt: skip
# (processes, sizes of the mesh, number of samples of each data-parallel rank or their indices; the last takes the rest)
Meshes = Mapping[str, tuple[int, ParallelConfig, Sequence[int] | Sequence[Sequence[int]]]]


def partition_of(count: int, sizes: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Contiguous runs of the given sizes, the last one takes the rest; given indices stay as they are."""
    if not isinstance(sizes[0], int):
        return [list(part) for part in sizes]
    bounds = [0, *np.minimum(np.cumsum(sizes[:-1]), count).astype(int).tolist(), count]
    return [list(range(bounds[i], bounds[i + 1])) for i in range(len(sizes))]


SHORT = {
    "tp": "tensor_model_parallel_size", "sp": "sequence_parallel", "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank", "layout": "pipeline_model_parallel_layout",
    "cp": "context_parallel_size", "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
}  # fmt: skip


def sizes(**fields: object) -> ParallelConfig:
    """A mesh by its sizes' short names, and other fields by their own."""
    return ParallelConfig(**{SHORT.get(name, name): value for name, value in fields.items()})


def joined(ranks: list[RankResult], model: ModelConfig, partition: list[list[int]]) -> Outcome:
    """The outcome of all ranks as if one had computed it; what ranks should agree on must agree bit for bit."""
    assert len({rank.loss for rank in ranks}) == 1
    assert all(rank.metrics == ranks[0].metrics and rank.grad_norm == ranks[0].grad_norm for rank in ranks)
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for name, gradient in rank.gradients.items():
            shard_rank = rank.expert_tensor_rank if ".local_experts." in name else rank.tensor_rank
            # On all replicas the same, a tied weight also on the first and the last stage.
            assert torch.equal(parts.setdefault(name, {}).setdefault(shard_rank, gradient), gradient), name
    gradients = {}
    for name, by_rank in parts.items():
        gradients |= join_shards([{name: by_rank[shard_rank]} for shard_rank in sorted(by_rank)], model)
    logprobs: dict[int, np.ndarray] = {}
    for rank in ranks:
        assert len(rank.logprobs) == len(partition[rank.data_rank])
        for index, values in zip(partition[rank.data_rank], rank.logprobs, strict=True):
            assert np.array_equal(logprobs.setdefault(index, values), values)
    return Outcome(ranks[0].loss, [logprobs[index] for index in sorted(logprobs)], gradients)


@dataclass
class MeshSuite:
    """Models, meshes and samples of a test module; weights and the outcomes of one process are computed once.

    Attributes:
        samples: by the name of the forest; most modules have one forest, named "".
        make_weights: weights of a model from a seed.
    """

    models: dict[str, ModelConfig]
    meshes: Meshes
    samples: dict[str, list[TrainingSample]]
    cuts: dict[str, tuple] = field(default_factory=lambda: CUTS)
    make_weights: Callable[[ModelConfig, int], dict[str, torch.Tensor]] = weights_of

    def __post_init__(self) -> None:
        self.objective = make_objective(ObjectiveConfig(**GRPO))
        self.weights = {name: self.make_weights(model, 5) for name, model in self.models.items()}
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def outcome(self, model: str, forest: str = "") -> Outcome:
        """The outcome of training each sequence alone on one process."""
        if (model, forest) not in self._outcomes:
            samples = self.samples[forest]
            self._outcomes[model, forest] = run_stock(
                self.models[model], self.weights[model], samples, self.objective, TEMPERATURE
            )
        return self._outcomes[model, forest]

    def partition(self, mesh: str, forest: str = "") -> list[list[int]]:
        return partition_of(len(self.samples[forest]), self.meshes[mesh][2])

    def case(self, mesh: str, name: str, cut: str, forest: str = "", **changes: object) -> MeshCase:
        tree, partition = tree_config(*self.cuts[cut]), self.partition(mesh, forest)
        case = MeshCase(
            self.models[name],
            self.meshes[mesh][1],
            tree,
            self.samples[forest],
            partition,
            self.weights[name],
            GRPO,
            TEMPERATURE,
        )
        return replace(case, **changes)

    def run(
        self, combinations: Sequence[tuple[str, ...]], folder: Path, more: dict[str, MeshCase] | None = None
    ) -> dict[str, list[RankResult]]:
        """The results of all combinations, in order of rank, by the combination's words.

        The first case of a mesh also runs a forward-only pass.

        Args:
            more: further cases by name; the name's first word is the mesh.
        """
        cases = {" ".join(combination): self.case(*combination) for combination in combinations} | (more or {})
        seen, results = set(), {}
        for name, case in cases.items():
            mesh = name.split()[0]
            cases[name] = replace(case, forward_only=mesh not in seen)
            seen.add(mesh)
        for world_size in sorted({size for size, *_ in self.meshes.values()}):
            rank_cases = {name: case for name, case in cases.items() if self.meshes[name.split()[0]][0] == world_size}
            ranks = run_on_ranks(run_cases, rank_cases, world_size, folder / str(world_size))
            results |= {name: [rank[name] for rank in ranks] for name in rank_cases}
        return results

    def check(self, ranks: list[RankResult], mesh: str, model: str, forest: str = "") -> Outcome:
        """Compare the ranks of one case with one process; returns its outcome."""
        expected = self.outcome(model, forest)
        outcome = joined(ranks, self.models[model], self.partition(mesh, forest))
        assert outcome.gradients.keys() == expected.gradients.keys()
        errors = compare_outcomes(outcome, expected)
        assert errors.largest() < 1e-12, errors
        return expected

    def sees_fault(self, ranks: list[RankResult], mesh: str, model: str) -> bool:
        """Whether the comparison notices what was left out in these results; ranks may not even agree."""
        try:
            outcome = joined(ranks, self.models[model], self.partition(mesh))
        except (AssertionError, ValueError):
            return True
        return compare_outcomes(outcome, self.outcome(model)).gradient > 1e-3
