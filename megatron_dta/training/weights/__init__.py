"""Weights that leave or enter the trainer outside of checkpoints."""
