"""Attention of decoding over paged keys and values."""
