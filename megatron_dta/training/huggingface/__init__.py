"""Hugging Face checkpoints in and out: configurations, names and weights."""
