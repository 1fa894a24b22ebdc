"""Errors, files and what else every ring needs."""
