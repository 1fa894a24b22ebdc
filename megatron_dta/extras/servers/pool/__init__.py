"""Several rollout servers as one."""
