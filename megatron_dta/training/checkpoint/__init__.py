"""Saves and loads checkpoints."""
