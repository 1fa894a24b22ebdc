"""Logits to logprobs and entropies in chunks, and sampling of next tokens."""
