"""Starts training processes as torchrun does, forked off this one, and starts them again after one has died.

python elastic_train.py NUM_PROCESSES MAX_RESTARTS [training flags]
"""

import sys

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.train import main


def train(*flags: str) -> None:
    """What one process runs."""
    sys.argv = ["train", *flags]
    run_entry_point(main)


if __name__ == "__main__":
    processes, restarts, *flags = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(processes),
        max_restarts=int(restarts),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        start_method="fork",
    )
    # For its records it looks through all modules, again and again.
    dynamic_rendezvous.get_method_name = lambda depth=2: "a method"
    elastic_launch(config, train)(*flags)
