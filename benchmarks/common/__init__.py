"""Shared parts of the benchmarks: engines to measure, attention cases, profiles."""
