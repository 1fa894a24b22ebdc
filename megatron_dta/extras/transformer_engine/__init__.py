"""Layers of Transformer Engine."""
