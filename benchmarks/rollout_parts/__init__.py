"""The measurements that `benchmarks/rollout.py` offers as subcommands."""
