"""Gives ranks that share experts plans with equal numbers of operations."""
