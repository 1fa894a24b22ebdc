"""Attention of a segment by FlashAttention 4, where it is installed."""
