"""Random segments for tree attention, and the checks that run both in the interpreter and on a GPU."""

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dta_kernels.tree_attention import launch
from dta_kernels.tree_attention.blocks import local_key_end
from dta_kernels.tree_attention.config import KernelConfig, TreeAttentionConfig
from dta_kernels.tree_attention.launch import KeyGradients
from dta_kernels.tree_attention.plan import AttentionShape, TreeAttentionPlan, plan_tree_attention
from dta_kernels.tree_attention.reference import tree_attention_backward as reference_backward
from dta_kernels.tree_attention.reference import tree_attention_forward as reference_forward

SCALE = 0.21


@dataclass(frozen=True)
class Segment:
    """Stream indices of one segment: queries, keys (ancestors first) and the keys' subtree ends."""

    query_index: np.ndarray
    key_index: np.ndarray
    key_end: np.ndarray

    @property
    def num_ancestors(self) -> int:
        return len(self.key_index) - len(self.query_index)

    def local_key_end(self) -> np.ndarray:
        """``key_end`` in positions of the keys."""
        ancestors, segment = np.split(self.key_end, [self.num_ancestors])
        return local_key_end(int(self.query_index[0]), len(self.query_index), ancestors, segment)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.from_numpy(a).to(device) for a in (self.query_index, self.key_index, self.key_end))


def random_parents(generator: np.random.Generator, size: int, turn: float) -> np.ndarray:
    """Parents of a random forest in preorder that leaves its path with probability ``turn`` at each token."""
    parent, path = np.full(size, -1), []
    for token in range(1, size):
        path.append(token - 1)
        del path[len(path) - (generator.integers(0, len(path) + 1) if generator.random() < turn else 0) :]
        parent[token] = path[-1] if path else -1
    return parent


def segment_of(parent: np.ndarray, begin: int, end: int) -> Segment:
    """The segment of the stream's tokens ``begin .. end``."""
    subtree_end = np.arange(1, len(parent) + 1)
    for token in range(len(parent) - 1, 0, -1):
        if parent[token] >= 0:
            subtree_end[parent[token]] = max(subtree_end[parent[token]], subtree_end[token])
    path, token = [], parent[begin]
    while token >= 0:
        path.append(token)
        token = parent[token]
    queries = np.arange(begin, end)
    keys = np.concatenate([np.array(path[::-1], dtype=np.int64), queries])
    return Segment(queries, keys, subtree_end[keys])


def big_segment(generator: np.random.Generator, size: int) -> Segment:
    """A segment with ancestors in a random forest of long branches."""
    parent = random_parents(generator, size, 0.01)
    begin = size // 2
    while parent[begin] < 0:
        begin += 1
    return segment_of(parent, begin, size - int(generator.integers(0, size // 10)))


def random_segment(generator: np.random.Generator, size: int, turn: float = 0.1) -> Segment:
    """A random run of a random forest of ``size`` tokens, with ancestors where its first token has some."""
    parent = random_parents(generator, size, turn)
    begin = int(generator.integers(0, size))
    return segment_of(parent, begin, int(generator.integers(begin + 1, size + 1)))


@dataclass
class Case:
    """Inputs of one attention call in ``shape.dtype``."""

    # The module with the kernels.
    attention: ClassVar[ModuleType] = launch

    segment: Segment
    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor

    @classmethod
    def random(cls, segment: Segment, shape: AttentionShape, device: torch.device) -> Self:
        num_queries, num_keys = len(segment.query_index), len(segment.key_index)

        def normal(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, shape.head_size, device=device).to(shape.dtype)

        return cls(
            segment,
            shape,
            normal(num_queries, shape.num_heads),
            normal(num_keys, shape.num_groups),
            normal(num_keys, shape.num_groups),
            normal(num_queries, shape.num_heads),
        )

    def plan(self, config: TreeAttentionConfig | None) -> tuple[TreeAttentionPlan, Tensor]:
        ends, device = self.segment.local_key_end(), self.q.device
        plan = plan_tree_attention(ends, len(self.segment.query_index), self.shape, device, config)
        return plan, torch.from_numpy(ends).to(device)

    def run(self, config: TreeAttentionConfig | None = None, into: KeyGradients | None = None) -> list[Tensor]:
        """``[out, lse, dq, dk, dv]`` of the kernels, from memory that was NaN before."""
        plan, key_end = self.plan(config)
        with poisoned_memory():
            out, lse = self.attention.tree_attention_forward(self.q, self.k, self.v, key_end, plan, SCALE)
            gradients = self.attention.tree_attention_backward(
                self.grad_out, self.q, self.k, self.v, out, lse, key_end, plan, SCALE, into
            )
        return [out, lse, *gradients]

    def expected(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """The same by the reference, computed in ``dtype`` from the same inputs."""
        q, k, v, grad_out = (tensor.to(dtype) for tensor in (self.q, self.k, self.v, self.grad_out))
        indices = self.segment.tensors(self.q.device)
        out, lse = reference_forward(q, k, v, *indices, SCALE)
        return [out, lse, *reference_backward(grad_out, q, k, v, out, lse, *indices, SCALE)]


class poisoned_memory:  # noqa: N801  reads as a statement
    """While it is active, memory that a launcher allocates holds NaN until something is written."""

    def __enter__(self) -> None:
        self.fill = torch.utils.deterministic.fill_uninitialized_memory
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)) for a, e in zip(
        actual, expected, strict=True
    )]  # fmt: skip


def tiny_config(
    rows: int = 16, keys: int = 16, tma: bool = False, stored_scores_bytes: int = 1 << 20, max_pack: int = 8,
    least_tiles: int = 16,
) -> TreeAttentionConfig:  # fmt: skip
    """Small tiles, so that small inputs have many blocks of every kind."""
    kernel = KernelConfig(rows, keys, 4, 1, tma, max_pack)
    return TreeAttentionConfig(kernel, kernel, kernel, stored_scores_bytes, least_tiles)


def accumulators_for(case: Case, generator: np.random.Generator) -> KeyGradients:
    """Accumulators with something in them, slots in no order, more of them than keys."""
    num_keys, num_slots = case.k.shape[0], case.k.shape[0] + 9
    slots = torch.from_numpy(generator.permutation(num_slots)[:num_keys]).to(case.q.device)
    grad_keys, grad_values = (
        torch.randn(num_slots, *case.k.shape[1:], device=case.q.device) for _ in range(2)
    )  # fmt: skip
    return KeyGradients(grad_keys, grad_values, slots)


def check_accumulation(case: Case, config: TreeAttentionConfig | None, generator: np.random.Generator) -> None:
    """``into`` gives what adding dK and dV by hand gives, and touches nothing else."""
    into = accumulators_for(case, generator)
    before = into.keys.clone(), into.values.clone()
    out, lse, dq, *plain = case.run(config)
    again = case.run(config, into)
    A = case.segment.num_ancestors
    # Sums may be rounded in another order.
    tolerance = 4e-6
    assert all(torch.equal(x, y) for x, y in zip(again[:3], (out, lse, dq), strict=True))
    for accumulator, old, segment_gradient, all_keys in zip(
        (into.keys, into.values), before, again[3:], plain, strict=True
    ):
        ancestors, owners = into.slots[:A], into.slots[A:]
        torch.testing.assert_close(
            accumulator[ancestors], all_keys[:A] + old[ancestors], rtol=tolerance, atol=tolerance
        )
        untouched = torch.ones(len(old), dtype=torch.bool, device=old.device)
        untouched[into.slots] = False
        assert torch.equal(accumulator[untouched], old[untouched])
        assert segment_gradient.dtype == case.shape.dtype
        rounding = max(tolerance, 2 * torch.finfo(segment_gradient.dtype).eps)
        torch.testing.assert_close(segment_gradient.float(), all_keys[A:] + old[owners], rtol=rounding, atol=tolerance)


def check_sibling_changes_no_bit(
    generator: np.random.Generator, shape: AttentionShape, lengths: tuple[int, int, int, int],
    config: TreeAttentionConfig | None, device: torch.device,
) -> None:  # fmt: skip
    """Two branches under a trunk: what the first holds changes neither output nor gradient of the second."""
    above, trunk, first, second = lengths
    parent = np.arange(-1, sum(lengths) - 1)
    parent[above + trunk + first] = above + trunk - 1
    segment = segment_of(parent, above, len(parent))
    case = Case.random(segment, shape, device)
    results = []
    for _ in range(2):
        results.append(case.run(config))
        for tensor, shift in (
            (case.q, trunk),
            (case.grad_out, trunk),
            (case.k, above + trunk),
            (case.v, above + trunk),
        ):
            tensor[shift : shift + first] = torch.randn_like(tensor[shift : shift + first]) * 3
    other_queries = torch.cat([torch.arange(trunk), torch.arange(trunk + first, trunk + first + second)]).to(device)
    own_keys = slice(above + trunk + first, None)
    (out, lse, dq, dk, dv), (out_2, lse_2, dq_2, dk_2, dv_2) = results
    assert torch.equal(out[other_queries], out_2[other_queries])
    assert torch.equal(lse[:, other_queries], lse_2[:, other_queries])
    assert torch.equal(dq[other_queries], dq_2[other_queries])
    assert torch.equal(dk[own_keys], dk_2[own_keys])
    assert torch.equal(dv[own_keys], dv_2[own_keys])
    assert not torch.equal(out, out_2)
    assert not torch.equal(dk, dk_2)


def compiled_variants() -> int:
    """Variants of the tree attention kernels that were compiled in this process."""
    from dta_kernels.tree_attention import backward as tree_attention_backward
    from dta_kernels.tree_attention import forward as tree_attention_forward

    kernels = (
        tree_attention_forward.forward_kernel,
        tree_attention_backward.prepare_kernel,
        tree_attention_backward.key_gradients_kernel,
        tree_attention_backward.query_gradients_kernel,
    )
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())
