"""Prompts, tokenizers and chat templates."""
