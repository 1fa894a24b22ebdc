"""The training loop: collect rollouts, prepare samples, step, evaluate, save. ``loop`` reads from top to bottom."""
