"""Plans that give all ranks of an expert-parallel group the same sequence of operations."""
