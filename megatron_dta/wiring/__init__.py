"""Builds a run out of the rings and the extras that its flags ask for."""
