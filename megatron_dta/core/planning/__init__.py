"""Plans made before a step runs: ranks, segments, schedule, what is recomputed, index arrays. NumPy only."""
