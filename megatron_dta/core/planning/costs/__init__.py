"""Predicts the seconds and the bytes of a segment."""
