"""Adapters that put the tree engine into other trainers."""

from megatron_dta.wiring.attach import attach_extras

attach_extras()
