"""Settings of the tree attention kernels that ``benchmarks/layers/attention.py`` tries in addition to the table's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dta_kernels.tree_attention.config import KernelConfig, TreeAttentionConfig

# By padded head size; what is likeliest to work comes first, a compiler that crashes then costs least.
_FORWARD = {
    64: [(128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3)],
    128: [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2),
          (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 3)],
    256: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2)],
}  # fmt: skip
_KEY_GRADIENTS = {
    64: [(64, 128, 8, 3), (64, 128, 8, 2), (64, 128, 4, 2), (128, 128, 8, 2), (64, 64, 4, 3)],
    128: [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 8, 2), (32, 128, 8, 3),
          (32, 128, 4, 3), (32, 64, 4, 3)],
    256: [(64, 64, 8, 1), (32, 64, 8, 2), (32, 64, 4, 1), (64, 64, 8, 2)],
}  # fmt: skip
_QUERY_GRADIENTS = {
    64: [(4, 3), (4, 4), (4, 5), (8, 3)],
    128: [(4, 3), (4, 2), (4, 4), (8, 3)],
    256: [(4, 3), (4, 2), (8, 2)],
}


def forward_candidates(
    base: TreeAttentionConfig, padded_head_size: int, tma: bool, hopper: bool
) -> Iterator[TreeAttentionConfig]:
    """The forward kernel's, with and without tensor descriptors where these can be used; one head per tile too.

    hopper: the kernels of ``hopper_forward`` as well.
    """
    for settings in _FORWARD[padded_head_size]:
        for descriptors in (True, False) if tma else (False,):
            yield replace(base, forward=KernelConfig(*settings, tma=descriptors))
    yield replace(base, forward=replace(base.forward, max_pack=1))
    if hopper and padded_head_size <= 128:
        for keys in (128, 64):
            yield replace(base, forward=KernelConfig(128, keys, 4, 2, tma=True, hopper=True))


def key_gradient_candidates(
    base: TreeAttentionConfig, padded_head_size: int, hopper: bool
) -> Iterator[TreeAttentionConfig]:
    """Those of the kernel that computes dK and dV; its tiles are dQ's too."""
    for rows, keys, *launch in _KEY_GRADIENTS[padded_head_size]:
        for descriptors in (False, True):
            settings = KernelConfig(rows, keys, *launch, tma=descriptors)
            # The Hopper kernel for dQ reads the tiles of the Hopper kernel for dK and dV only.
            queries = KernelConfig(rows, keys, 4, 2) if base.query_gradients.hopper else base.query_gradients
            yield replace(base, key_gradients=settings, query_gradients=queries)
    yield replace(base, key_gradients=replace(base.key_gradients, max_pack=1))
    if hopper and padded_head_size <= 128:
        yield replace(
            base,
            key_gradients=KernelConfig(64, 128, 4, 2, tma=True, hopper=True),
            query_gradients=KernelConfig(128, 128, 4, 6, tma=True, hopper=True),
        )


def query_gradient_candidates(
    base: TreeAttentionConfig, padded_head_size: int, tma: bool
) -> Iterator[TreeAttentionConfig]:
    """Those of the kernel that computes dQ, and the memory for its input."""
    tile = base.key_gradients
    for warps, stages in _QUERY_GRADIENTS[padded_head_size]:
        for descriptors in (False, True) if tma else (False,):
            settings = KernelConfig(tile.rows, tile.keys, warps, stages, tma=descriptors)
            yield replace(base, query_gradients=settings)
    for mebibytes in (128, 256, 512, 2048):
        yield replace(base, stored_scores_bytes=mebibytes << 20)
