"""Scores sampled responses."""
