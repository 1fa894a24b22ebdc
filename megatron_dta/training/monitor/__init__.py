"""Metrics, signals, time-outs and other observers of a run."""
