"""Divides the sequences of a step over data-parallel ranks and mini-batches."""
