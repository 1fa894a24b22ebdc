"""The parts of the AReaL-DTA experiment: rollout sets, plans of each mode and order, balancers, and rivals."""
