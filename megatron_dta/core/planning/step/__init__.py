"""Turns the samples of one step into the plan that the engine executes."""
