"""The commands that serve a model: to agents, and a teacher to training."""
