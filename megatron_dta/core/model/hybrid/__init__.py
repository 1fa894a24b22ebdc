"""Layers that carry a state along each path and their states at forks, layers of one part, and gated attention."""
