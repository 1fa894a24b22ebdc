"""Transformer layers: fused, with adapters, of Transformer Engine, and for decoding."""
