"""Turns rollouts into the samples of a training step."""
