"""Adapters that put the tree engine into other trainers."""
