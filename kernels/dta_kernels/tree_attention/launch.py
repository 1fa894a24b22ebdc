"""Tree attention by Triton kernels, forward and backward, for one segment.

The contract is that of ``reference``; a ``TreeAttentionPlan``, made from the indices before the step, replaces them.
Lengths are runtime arguments, so one compilation serves all segments of a step. Sums over queries and heads happen
inside one program in a fixed order, so results are reproducible bit for bit.

Legend: N queries, M = A + N keys (A ancestors, then the queries' own), H query heads, G key/value heads, D head size,
S slots of a K/V pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dta_kernels.launch import Launcher
from dta_kernels.tree_attention.backward import key_gradients_kernel, prepare_kernel, query_gradients_kernel
from dta_kernels.tree_attention.config import KernelConfig, padded_head_size
from dta_kernels.tree_attention.forward import forward_kernel
from dta_kernels.tree_attention.layer_cache import SharedByLayers
from dta_kernels.tree_attention.plan import AttentionShape, BackwardPart, TreeAttentionPlan


@dataclass(frozen=True)
class KeyGradients:
    """Accumulators of dK and dV over a step, and the slots of a segment's keys in them.

    Attributes:
        keys, values: float32 [S, G, D], contiguous.
        slots: int64 [M], distinct.
    """

    keys: Tensor | None
    values: Tensor | None
    slots: Tensor | None


def tree_attention_forward(
    q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, key_end_M: Tensor, plan: TreeAttentionPlan, scale: float,
    shared: SharedByLayers | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of every query over the keys it sees.

    Args:
        q_NHD, k_MGD, v_MGD: queries, and keys and values of [ancestors, own]; one dtype.
        key_end_M: int32, ``local_key_end`` of the plan's segment.
        scale: factor on the scores, above 0.
        shared: cache for all layers of this segment.

    Returns:
        ``(out_NHD, lse_HN)``: the output in the queries' dtype, the log-sum-exp of the scaled scores in float32. A
        query that sees no key gets 0 and minus infinity.
    """
    check_inputs(plan, scale, q_NHD, k_MGD, v_MGD, key_end_M)
    q_NHD, k_MGD, v_MGD = q_NHD.contiguous(), k_MGD.contiguous(), v_MGD.contiguous()
    if plan.paths is not None:
        from dta_kernels.invariant.attention_kernel import path_attention_forward

        return path_attention_forward(q_NHD, k_MGD, v_MGD, plan.paths, scale)
    shape, settings = plan.shape, plan.config.forward
    out_NHD = torch.empty_like(q_NHD)
    lse_HN = q_NHD.new_empty((shape.num_heads, plan.num_queries), dtype=torch.float32)
    pack = settings.pack(shape.group_size)
    shared = shared or SharedByLayers()
    if settings.hopper:
        from dta_kernels.tree_attention.hopper_launch import forward_on_hopper

        forward_on_hopper(q_NHD, k_MGD, v_MGD, out_NHD, lse_HN, key_end_M, plan, scale, shared)
        return out_NHD, lse_HN
    launch = shared.get("forward", lambda: _launcher(forward_kernel, shape, settings, pack, settings))
    launch(
        (shape.num_heads // pack, plan.forward.programs.shape[0]), q_NHD, _keys(shared, "k", k_MGD, settings),
        _keys(shared, "v", v_MGD, settings), out_NHD, lse_HN, key_end_M, plan.forward.programs, plan.forward.blocks,
        plan.num_queries, plan.num_keys, plan.num_ancestors, scale,
    )  # fmt: skip
    return out_NHD, lse_HN


def tree_attention_backward(
    grad_out_NHD: Tensor, q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, out_NHD: Tensor, lse_HN: Tensor,
    key_end_M: Tensor, plan: TreeAttentionPlan, scale: float, into: KeyGradients | None = None,
    shared: SharedByLayers | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``tree_attention_forward``, from its outputs.

    ``out`` and ``lse`` may also come from attention over more keys, merged; the result is then the share of these keys
    in the gradients.

    Args:
        into: None returns all of dK and dV. Otherwise, the ancestors' dK and dV are added in place at their slots. The
            values at the own slots (from descendants) are added to the own dK and dV, and are undefined afterwards.
        shared: cache for all layers of this segment; afterwards it also holds the temporary buffers of the backward
            pass.

    Returns:
        ``(dq_NHD, dk, dv)``: dq in the queries' dtype. Without ``into`` dk and dv are float32 [M, G, D]; with it they
        are the own ones [N, G, D] in the queries' dtype.
    """
    check_inputs(plan, scale, q_NHD, k_MGD, v_MGD, key_end_M)
    tensors = (grad_out_NHD, q_NHD, k_MGD, v_MGD, out_NHD, lse_HN)
    grad_out_NHD, q_NHD, k_MGD, v_MGD, out_NHD, lse_HN = (tensor.contiguous() for tensor in tensors)
    shape, settings, backward = plan.shape, plan.config.key_gradients, plan.backward()
    pack = settings.pack(shape.group_size)
    shared = shared or SharedByLayers()
    tiles = _prepare(grad_out_NHD, out_NHD, lse_HN, q_NHD, pack, settings, shared)
    dq_NHD = torch.empty_like(q_NHD)
    if into is not None:
        check_accumulators(plan, into)
    if len(backward.parts) > 1 or (into is None and backward.has_shares):
        # Several parts or programs add to the same keys in turn, so the gradients of all keys need accumulators.
        zeros = (torch.zeros_like(k_MGD, dtype=torch.float32) for _ in range(2))
        target = into or KeyGradients(*zeros, torch.arange(plan.num_keys, device=k_MGD.device))
        dk, dv, num_added = None, None, plan.num_keys
    elif into is not None:
        target, num_added = into, plan.num_ancestors
        dk, dv = (k_MGD.new_empty((plan.num_queries, *k_MGD.shape[1:])) for _ in range(2))
    else:
        target, num_added = KeyGradients(None, None, None), 0
        dk, dv = (torch.empty_like(k_MGD, dtype=torch.float32) for _ in range(2))
    launch = _BackwardLaunch(plan, shared, scale, target, num_added, k_MGD, v_MGD, key_end_M, dq_NHD, dk, dv, *tiles)
    dscores = shared.get("dscores", lambda: q_NHD.new_empty(backward.stored_elements))
    # Whose turn it is to add to the gradients of a block, for each half of it; every launch leaves zeros.
    blocks = -(-plan.num_keys // settings.keys)
    turns = shared.get("turns", lambda: dscores.new_zeros(blocks * shape.num_groups * 2, dtype=torch.int32))
    for part in backward.parts:
        for first_group in range(0, shape.num_groups, backward.stored_groups):
            groups = min(backward.stored_groups, shape.num_groups - first_group)
            launch.key_gradients(part, first_group, groups, dscores, turns)
            launch.query_gradients(part, first_group, groups, dscores)
    if dk is not None:
        return dq_NHD, dk, dv
    if into is None:
        return dq_NHD, target.keys, target.values
    segment_slots = into.slots[plan.num_ancestors :]
    return dq_NHD, *(sums.index_select(0, segment_slots).to(q_NHD.dtype) for sums in (into.keys, into.values))


@dataclass(slots=True)
class _BackwardLaunch:
    """The tensors of one backward pass, and its launches."""

    plan: TreeAttentionPlan
    shared: SharedByLayers
    scale: float
    target: KeyGradients
    num_added: int
    k: Tensor
    v: Tensor
    key_end: Tensor
    dq: Tensor
    dk: Tensor | None
    dv: Tensor | None
    delta: Tensor
    lse_2: Tensor
    grad_out_tiles: Tensor | TensorDescriptor
    q_tiles: Tensor | TensorDescriptor

    @property
    def pack(self) -> int:
        return self.plan.config.key_gradients.pack(self.plan.shape.group_size)

    def key_gradients(self, part: BackwardPart, first_group: int, groups: int, dscores: Tensor, turns: Tensor) -> None:
        plan, settings, target = self.plan, self.plan.config.key_gradients, self.target
        arrays = (
            self.k, self.v, self.delta, self.lse_2, self.dk, self.dv, target.keys, target.values, target.slots, dscores,
            self.key_end, turns, part.columns.programs, part.columns.blocks, part.columns.tiles,
        )  # fmt: skip
        if settings.hopper:
            from dta_kernels.tree_attention.hopper_launch import key_gradients_on_hopper

            key_gradients_on_hopper(
                plan, self.shared, (self.grad_out_tiles, self.q_tiles), arrays, self.num_added, first_group, groups,
                self.scale,
            )  # fmt: skip
            return
        made = (key_gradients_kernel, plan.shape, settings, self.pack, settings)
        launch = self.shared.get("key gradients", lambda: _launcher(*made, ACCUMULATE=target.keys is not None))
        launch(
            (groups, part.columns.programs.shape[0]), self.grad_out_tiles, self.q_tiles, *arrays,
            plan.num_queries, plan.num_keys, plan.num_ancestors, self.num_added, first_group, self.scale,
        )  # fmt: skip

    def query_gradients(self, part: BackwardPart, first_group: int, groups: int, dscores: Tensor) -> None:
        plan, settings = self.plan, self.plan.config.query_gradients
        tile, chunks = plan.config.key_gradients, plan.shape.group_size // self.pack
        if settings.hopper:
            from dta_kernels.tree_attention.hopper_launch import query_gradients_on_hopper

            query_gradients_on_hopper(
                plan, self.shared, (dscores, self.k, self.dq, self.delta), part.rows, first_group * chunks,
                groups * chunks, self.scale,
            )  # fmt: skip
            return
        made = (query_gradients_kernel, plan.shape, settings, self.pack, tile)
        launch = self.shared.get("query gradients", lambda: _launcher(*made))
        launch(
            (groups * chunks, part.rows.programs.shape[0]), dscores,
            _keys(self.shared, "k of tiles", self.k, settings, tile.keys), self.dq, part.rows.programs,
            part.rows.blocks, plan.num_queries, plan.num_keys, first_group * chunks, self.scale,
        )  # fmt: skip


def _prepare(
    grad_out_NHD: Tensor, out_NHD: Tensor, lse_HN: Tensor, q_NHD: Tensor, pack: int, settings: KernelConfig,
    shared: SharedByLayers,
) -> tuple[Tensor, Tensor, Tensor | TensorDescriptor, Tensor | TensorDescriptor]:  # fmt: skip
    """delta, base-2 log-sum-exp, dO and Q in the order in which ``key_gradients_kernel`` reads them."""
    N, H, D = q_NHD.shape
    # The tensor memory accelerator copies vectors from multiples of 16 bytes only.
    chunk_stride = -(-N * pack // 4) * 4 if settings.hopper else N * pack
    # The elements between the chunks are read and multiplied by zero.
    empty = lse_HN.new_empty if chunk_stride == N * pack else lse_HN.new_zeros
    delta, lse_2 = (shared.get(name, lambda: empty(H // pack, chunk_stride)) for name in ("delta", "lse_2"))
    tiles = (grad_out_NHD, q_NHD)
    if settings.tma:
        tiles = tuple(shared.get(name, lambda: torch.empty_like(q_NHD)) for name in ("tiles of dO", "tiles of q"))
    rows = 64
    launch = shared.get("prepare", lambda: _prepare_launcher(H, D, pack, rows, settings.tma))
    launch((-(-N * H // rows),), grad_out_NHD, out_NHD, lse_HN, q_NHD, delta, lse_2, *tiles, N, chunk_stride)
    if settings.tma and not settings.hopper:
        block = [settings.rows, padded_head_size(D)]
        names = ("tiles of dO as descriptor", "tiles of q as descriptor")
        tiles = tuple(
            shared.of_tensor(name, tile, lambda x: TensorDescriptor(x, [N * H, D], [D, 1], block))
            for name, tile in zip(names, tiles, strict=True)
        )
    return delta, lse_2, *tiles


def _keys(
    shared: SharedByLayers, name: str, x_MGD: Tensor, settings: KernelConfig, block: int | None = None
) -> Tensor | TensorDescriptor:
    """Keys or values in the form that a kernel reads; ``name`` identifies one use."""
    if not settings.tma:
        return x_MGD
    M, G, D = x_MGD.shape
    return shared.of_tensor(
        name, x_MGD, lambda x: TensorDescriptor(x, [M, G * D], [G * D, 1], [block or settings.keys, D])
    )


@lru_cache
def _prepare_launcher(H: int, D: int, pack: int, rows: int, copy: bool) -> Launcher:
    constants = dict(H=H, D=D, BLOCK_D=padded_head_size(D), PACK=pack, ROWS=rows, COPY=copy)
    return Launcher(prepare_kernel, **constants, num_warps=4)


@lru_cache
def _launcher(
    kernel: object, shape: AttentionShape, settings: KernelConfig, pack: int, tile: KernelConfig, **more: bool
) -> Launcher:
    """The kernel with its compile-time arguments; ``tile`` sets the tile sizes and may belong to another kernel."""
    heads, D = {"H": shape.num_heads, "G": shape.num_groups, "PACK": pack}, shape.head_size
    sizes = {"D": D, "BLOCK_D": padded_head_size(D), "BLOCK_Q": tile.rows // pack, "BLOCK_K": tile.keys}
    launch = {"TMA": settings.tma, "num_warps": settings.num_warps, "num_stages": settings.num_stages}
    return Launcher(kernel, **heads, **sizes, **launch, **more)


def check_inputs(
    plan: TreeAttentionPlan, scale: float, q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, key_end_M: Tensor
) -> None:
    """Raise ``ValueError`` if the inputs do not fit the plan."""
    given = [(tensor.shape, tensor.dtype) for tensor in (q_NHD, k_MGD, v_MGD, key_end_M)]
    if given != plan.inputs:
        raise ValueError(f"queries, keys, values and ends of keys {given} do not fit a plan for {plan.inputs}")
    if not scale > 0:
        raise ValueError(f"scale {scale}: must be above 0")


def check_accumulators(plan: TreeAttentionPlan, into: KeyGradients) -> None:
    """Raise ``ValueError`` if the accumulators do not fit the plan."""
    are_sums = all(sums.dtype == torch.float32 and sums.is_contiguous() for sums in (into.keys, into.values))
    if not are_sums or into.slots.shape != (plan.num_keys,) or into.slots.dtype != torch.int64:
        raise ValueError(f"dK and dV need contiguous float32 accumulators, and slots int64 [{plan.num_keys}]")
