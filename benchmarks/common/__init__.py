"""Shared parts of the benchmarks: engines to measure, attention cases, profiles."""

from megatron_dta.wiring.attach import attach_extras

attach_extras()
