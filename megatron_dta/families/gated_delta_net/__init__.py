"""Gated delta net beside gated attention: Qwen3-Next and Qwen3.5 (arXiv:2412.06464)."""
