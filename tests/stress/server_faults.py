"""Trains on rollouts of servers that are killed and restarted, with ``--rollout-max-staleness``.

    python tests/stress/server_faults.py [--steps 200] [--kind vllm] [--transfer folder] [--seed 0]

The run itself is killed halfway and continued. Checked are: no group of rollouts is lost or trained twice, every token
has the logprob of the version that it names, versions are within the bound, and what the checkpoint kept is trained bit
for bit. Servers are the tests' local ones, with a tiny model. Status 0 if all holds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import shared  # noqa: F401 (before the helpers)
import numpy as np

from megatron_dta.wiring import engines as build
from partial_rollout_cases import QUICK, Fleet, train_with_faults
from rollout_runs import Runs


def main() -> None:
    """Run it, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kind", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--transfer", choices=("folder", "gloo"), default="folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build.HttpSettings = QUICK
    rng = np.random.default_rng(args.seed)
    begin = time.monotonic()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        runs = Runs(stack, Path(folder), rng)
        fleet = Fleet(runs, args.kind, rng)
        flags = f"--rollout-weight-transfer {args.transfer}"
        found = train_with_faults(runs, fleet, args.steps, args.steps // 2 + 1, flags)
    print(f"{args.steps} steps in {time.monotonic() - begin:.0f} s: {found}; servers: {dict(fleet.events)}")


if __name__ == "__main__":
    main()
