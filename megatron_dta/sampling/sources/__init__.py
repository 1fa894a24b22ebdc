"""Rollout sources: each one transforms or feeds the batches of the one below it."""
