"""Samples on the training weights: scheduler, paged K/V, CUDA graphs, speculative drafts."""
