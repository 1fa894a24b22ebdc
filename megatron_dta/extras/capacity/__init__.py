"""Predicts the memory and time of a run before it is submitted."""
