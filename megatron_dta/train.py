"""Entry point of training: ``python -m megatron_dta.train --num-layers 4 ... --task arithmetic --save runs/first``.

Training runs on CUDA GPUs if there are any and on the CPU otherwise, in one process or under ``torchrun``.
``--help`` lists all flags; ``examples/`` holds complete commands. The exit status is 0 after the last step and after
SIGTERM or SIGUSR1 (the state is saved, and the same command continues), 130 after Ctrl-C (the state is saved, too), and
2 after invalid input.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

from megatron_dta.common.entry_point import run_entry_point

if TYPE_CHECKING:
    from megatron_dta.common.console import Console
    from megatron_dta.training.config import TrainConfig


def main() -> int:
    """Parse the command line, train, and leave metrics and a checkpoint."""
    # OpenMP threads that spin while they wait make a step 50 times slower on cores that other processes use too (5.2 s
    # instead of 0.1 s, measured with a small model and two threads). OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Imported here so that a wrong flag is reported before the import of Megatron, which takes seconds.
    # Nearly all that imports make stays: looking through it again and again takes a tenth of their time.
    gc.disable()
    from megatron_dta.common.console import Console
    from megatron_dta.training.arguments import parse_arguments
    from megatron_dta.training.config.derived.device_queues import set_device_queues
    from megatron_dta.wiring.attach import attach_extras

    attach_extras()

    config = parse_arguments()
    parallel = config.parallel
    warning = set_device_queues(os.environ, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
    # All processes compute the same metrics; the first one reports them.
    is_first = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not is_first)
    if warning is not None:
        console.print(f"warning: {warning}", soft_wrap=True)
    if config.logging.dry_run:
        from megatron_dta.wiring.dry_run import dry_run

        if is_first:
            dry_run(config, lambda line: console.print(line, soft_wrap=True))
        return 0

    from megatron_dta.training.checkpoint.finished import finished

    done = finished(config)
    if done is not None:
        for line in done:
            console.print(line, soft_wrap=True)
        return 0
    return _train(config, console)


def _train(config: TrainConfig, console: Console) -> int:
    import torch

    from megatron_dta.training.monitor.start_clock import mark
    from megatron_dta.training.monitor.stop_signals import INTERRUPTED
    from megatron_dta.wiring.setup import build_trainer

    mark("imports")
    trainer = build_trainer(config, console)
    # A full collection would visit a million objects of the imported modules, for 0.1 to 0.3 s every few steps.
    gc.freeze()
    gc.enable()
    try:
        trainer.run()
    finally:
        trainer.metrics.close()
        gc.unfreeze()
    torch.distributed.destroy_process_group()
    return INTERRUPTED if trainer.stopped_by == "SIGINT" else 0


if __name__ == "__main__":
    run_entry_point(main)
