"""Decoding with a paged cache of keys and values."""
