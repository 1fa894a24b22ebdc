"""Layers that carry a state along each path: gated delta net, its states at forks, and gated attention."""
