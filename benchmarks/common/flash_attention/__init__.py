"""Attention of a segment by FlashAttention 4, a rival of this project's kernels, where it is installed."""
