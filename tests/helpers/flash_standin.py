"""Stands in for FlashAttention 4 on a CPU: the functions and classes that ``flash.library`` uses, in plain PyTorch.

It visits the blocks that it is given, block by block, with the mask that it is given, checks bounds where the library
does, and leaves dK and dV in the library's order of registers. Wrong lists, a wrong mask and a wrong order therefore
give wrong results here too. Sums are in float64. Blocks have 128 queries and keys, as in the library.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dta_kernels.tree_attention.flash import plan as flash_plan
from megatron_dta.model.attention import segment_attention

BLOCK, TILE = 128, 64
LOG2_E = math.log2(math.e)


class Blocks(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


class Aux(NamedTuple):
    tensors: list | None = None
    scalars: tuple | None = None


# Settings of the library's backward for 128 channels.
SETTINGS = SimpleNamespace(
    m_block_size=TILE, n_block_size=BLOCK, num_stages_Q=2, num_stages_dO=2, num_stages_PdS=2, num_wg=2,
    SdP_swapAB=True, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=1, AtomLayoutNdKV=2, AtomLayoutMdQ=1,
    dQ_single_wg=False,
)  # fmt: skip


def register_order(head_size: int) -> np.ndarray:
    """Place of each element of a block's dK in memory, [128, head size]: the accumulators of m64nNk16, register by
    register, of two warp groups of 128 threads, four registers of every thread at a time."""
    place = np.full((BLOCK, head_size), -1)
    for warp_group in range(2):
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            for register in range(head_size // 2):
                column = register // 4 * 8 + lane % 4 * 2 + register % 2
                row = 64 * warp_group + 16 * warp + lane // 4 + 8 * (register // 2 % 2)
                chunk, element = divmod(register, 4)
                place[row, column] = warp_group * 64 * head_size + chunk * 512 + thread * 4 + element
    assert (np.sort(place.reshape(-1)) == np.arange(place.size)).all()
    return place


def seen(mask: object, rows: Tensor, keys: Tensor, lengths: tuple[int, int], tensors: list, bounds: bool) -> Tensor:
    """The mask of rows and keys; indices outside wrap around and are masked where bounds are checked."""
    queries, num_keys = lengths
    q, k = (rows % queries, keys % num_keys) if bounds else (rows, keys)
    found = mask(None, None, q[:, None], k[None], SimpleNamespace(seqlen_q=queries, seqlen_k=num_keys), tensors)
    return found & (rows < queries)[:, None] & (keys < num_keys)[None] if bounds else found


def padded(x: Tensor, rows: int) -> Tensor:
    """Rows behind the end hold zeros, as a tensor map gives them."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask_mod: object, block_sparse_tensors: Blocks,
    return_lse: bool, aux_tensors: list,
) -> tuple[Tensor, ...]:  # fmt: skip
    (_, N, H, _), (_, M, G, _) = q.shape, k.shape
    assert block_sparse_tensors.block_size == (BLOCK, BLOCK)
    assert return_lse
    assert all(x.is_contiguous() and x.shape[0] == 1 for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(1, H, N, dtype=torch.float32)
    counts, lists = block_sparse_tensors[:4:2], block_sparse_tensors[1:4:2]
    for x in (*counts, *lists):
        assert x.dtype == torch.int32
        assert x.shape[:3] == (1, 1, -(-N // BLOCK))
    with _disable_current_modes():
        q_d, k_d, v_d = (x[0].double() for x in (q, k, v))
        k_d, v_d = (padded(x, -(-M // BLOCK) * BLOCK).repeat_interleave(H // G, 1) for x in (k_d, v_d))
        for block in range(-(-N // BLOCK)):
            rows = torch.arange(block * BLOCK, (block + 1) * BLOCK)
            q_rows = padded(q_d[block * BLOCK : (block + 1) * BLOCK], BLOCK)
            scores, values = [], []
            for count, entries, is_partial in zip(counts, lists, (True, False), strict=True):
                for place in reversed(range(int(count[0, 0, block]))):
                    keys = torch.arange(BLOCK) + int(entries[0, 0, block, place]) * BLOCK
                    first = place == int(count[0, 0, block]) - 1
                    score = torch.einsum("qhd,khd->hqk", q_rows, k_d[keys]) * softmax_scale
                    if is_partial:
                        visible = seen(mask_mod, rows, keys, (N, M), aux_tensors, first)
                        score = score.masked_fill(~visible, -math.inf)
                    else:
                        assert first or keys[-1] < M
                        score = score.masked_fill(keys >= M, -math.inf)
                    scores.append(score)
                    values.append(v_d[keys])
            score, inside = torch.cat(scores, -1), rows < N
            lse[0][:, rows[inside]] = score.logsumexp(-1)[:, inside].float()
            result = torch.einsum("hqk,khd->qhd", score.softmax(-1), torch.cat(values))
            out[0][rows[inside]] = result[inside].to(out.dtype)
    return out, lse, None, None, None


def preprocess(out, dout, dpsum, lse, lse_log2, dq_accum, *unused, fake_mode, hdim_multiple_of):
    N = out.shape[1]
    assert unused[:3] == (None,) * 3
    assert not fake_mode
    assert hdim_multiple_of == 32
    with _disable_current_modes():
        dpsum.zero_()
        dpsum[..., :N] = (out.double() * dout.double()).sum(-1).transpose(1, 2)
        lse_log2.fill_(math.inf)
        lse_log2[..., :N] = lse * LOG2_E
        dq_accum.zero_()


def postprocess(accum, output, scale, *unused, fake_mode, hdim_multiple_of):
    _, N, H, D = output.shape
    assert unused[:2] == (None, None)
    assert not fake_mode
    assert hdim_multiple_of == 32
    with _disable_current_modes():
        output.copy_((accum.view(1, H, -1, D)[:, :, :N].double() * scale).transpose(1, 2))


class BackwardKernel:
    """The library's main kernel, which is made with the same settings and called with the same arguments."""

    def __init__(self, dtype, head_size, head_size_v, ratio, causal, **settings):
        assert head_size == head_size_v
        assert ratio > 1
        assert not causal
        assert (settings["tile_m"], settings["tile_n"]) == (TILE, BLOCK)
        self.ratio, self.mask, self.subtiles = ratio, settings["mask_mod"], settings["q_subtile_factor"]
        self.place = torch.from_numpy(register_order(head_size))

    def __call__(self, q, k, v, dout, lse_2, dpsum, dq, dk, dv, scale, *more):
        assert more[:9] == (None,) * 9
        assert len(more) == 12
        assert more[11] is None
        (_, N, H, D), M = q.shape, k.shape[1]
        rows, num_blocks = -(-N // TILE) * TILE, -(-M // BLOCK)
        assert dq.shape == (1, H, rows * D)
        assert lse_2.shape == dpsum.shape == (1, H, rows)
        assert dk.shape == dv.shape == (1, H // self.ratio, num_blocks * BLOCK * D)
        partial_count, partial, full_count, full = more[10][:4]
        assert partial_count.shape == full_count.shape == (1, H, num_blocks)
        assert len(more[10]) == 8
        with _disable_current_modes():
            q, dout = (padded(x[0].double(), rows) for x in (q, dout))
            k, v = (padded(x[0].double(), num_blocks * BLOCK) for x in (k, v))
            for head in range(H):
                for block in range(num_blocks):
                    sums = [torch.zeros(BLOCK, D, dtype=torch.float64) for _ in range(2)]
                    keys, group = torch.arange(BLOCK) + block * BLOCK, head // self.ratio
                    for count, entries, is_partial in ((partial_count, partial, True), (full_count, full, False)):
                        tiles = entries[0, head, block, : int(count[0, head, block])] * self.subtiles
                        for tile in (int(first) + i for first in tiles for i in range(self.subtiles)):
                            if tile * TILE >= rows:
                                continue
                            at = torch.arange(TILE) + tile * TILE
                            score = q[at, head] @ k[keys, group].T
                            visible = (keys < M).expand(TILE, -1)
                            if is_partial:
                                visible = seen(self.mask, at, keys, (N, M), more[9].tensors, True)
                            score = (score * (scale * LOG2_E)).masked_fill(~visible, -math.inf)
                            p = torch.exp2(score - lse_2[0, head, at, None].double())
                            ds = p * (dout[at, head] @ v[keys, group].T - dpsum[0, head, at, None].double())
                            sums[0] += ds.T @ q[at, head]
                            sums[1] += p.T @ dout[at, head]
                            dq[0, head].view(rows, D)[at] += (ds @ k[keys, group]).float()
                    for accum, total in zip((dk, dv), sums, strict=True):
                        accum[0, group, block * BLOCK * D :][self.place.flatten()] += total.flatten().float()


def scalar(value: int | Tensor, dtype: object) -> Tensor:
    assert dtype == "Int32"
    return torch.as_tensor(value)


def normalize(tensors: Blocks, **sizes: object) -> tuple[Blocks, None]:
    heads = sizes["num_head"]
    assert sizes["block_size"][0] * sizes["q_subtile_factor"] == BLOCK
    assert tensors.mask_block_cnt.shape[2] == -(-sizes["seqlen_k"] // BLOCK)
    expanded = [x.expand(1, heads, *x.shape[2:]) for x in tensors[:4]]
    return Blocks(*expanded, block_size=tensors.block_size), None


def _modules() -> dict[str, ModuleType]:
    names: dict[str, dict[str, object]] = {
        "cutlass": {"Int32": "Int32"},
        "cutlass.cute": {
            "jit": lambda function: function,
            "compile": lambda kernel, *_, options: kernel,
            "runtime": SimpleNamespace(make_fake_stream=lambda use_tvm_ffi_env_stream: None),
        },
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {
            "BwdConfig": SimpleNamespace,
            "_flash_attn_fwd": flash_forward,
            "_bwd_preprocess": preprocess,
            "_bwd_postprocess_convert": postprocess,
            "_tile_size_bwd_sm90": lambda *_, **__: SETTINGS,
        },
        "flash_attn.cute.block_sparsity": {
            "BlockSparseTensorsTorch": Blocks,
            "normalize_block_sparse_config_bwd": normalize,
            "to_cute_block_sparse_tensors": lambda tensors: tensors,
        },
        "flash_attn.cute.cute_dsl_utils": {
            "to_cute_tensor": lambda x: x,
            "to_cute_aux_tensor": lambda x: x,
            "torch2cute_dtype_map": {dtype: dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)},
        },
        "flash_attn.cute.flash_bwd_sm90": {"FlashAttentionBackwardSm90": BackwardKernel},
        "flash_attn.cute.utils": {"AuxData": Aux, "scalar_to_ssa": scalar},
    }
    made = {name: ModuleType(name) for name in names}
    for name, values in names.items():
        vars(made[name]).update(values)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
    return made


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in the library's place, for any head size that is a multiple of 8, and for float32 too."""
    import dta_kernels.tree_attention.flash as package

    for name, module in _modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("library", "mask"):
        # What imports the library is imported anew, now and afterwards.
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", None)
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}")
        monkeypatch.setattr(package, name, None, raising=False)
        monkeypatch.delattr(package, name)
    monkeypatch.setattr(segment_attention, "installed_version", lambda: flash_plan.VERSION)
    monkeypatch.setattr(segment_attention, "DTYPES", (torch.float32, torch.bfloat16, torch.float16))
    monkeypatch.setattr(segment_attention, "HEAD_SIZES", tuple(range(8, 257, 8)))
