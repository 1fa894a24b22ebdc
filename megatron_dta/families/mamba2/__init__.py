"""Mamba-2 in layers with one part each: Nemotron-H and Nemotron 3 (arXiv:2405.21060, arXiv:2504.03624)."""
