"""Hugging Face's config.json: families, values, rotary positions, both directions."""
