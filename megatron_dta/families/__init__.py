"""Kinds of layers beside plain attention, a folder each; see docs/adding_a_family.md."""
