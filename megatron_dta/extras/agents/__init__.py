"""Agents as a source of rollouts: programs or functions that call the gateway, many at once."""
