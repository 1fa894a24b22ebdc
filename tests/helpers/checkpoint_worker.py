"""What ranks do in the tests of checkpoints: take steps, save, load on another mesh, fail in the middle.

A step's gradient depends on each weight alone, so its result must be the same bit for bit on every mesh.
"""

import random
import resource
import signal
import threading
import types
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.training.config import CheckpointConfig, OptimizationConfig, TrainConfig

MODEL = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, vocab_size=37, swiglu=True, disable_bias_linear=True
)
# Without clipping nothing is summed over the weights.
RATES = OptimizationConfig(lr=3e-3, min_lr=1e-4, lr_decay_style="cosine", train_iters=9, clip_grad=0.0)


@dataclass(frozen=True)
class Stretch:
    """Run ``steps`` steps from the weights of ``seed`` or from the checkpoint ``load``, then ``save``."""

    parallel: ParallelConfig
    steps: int
    save: Path
    load: Path | None = None
    seed: int = 0
    model: ModelConfig = field(default_factory=lambda: MODEL)
    rates: OptimizationConfig = field(default_factory=lambda: RATES)


class Rank:
    """One rank's part of a run."""

    def __init__(self, stretch: Stretch) -> None:
        from megatron_dta.core.model.build import build_model
        from megatron_dta.core.model.parallel.mesh import current_mesh, destroy_parallel, initialize_parallel
        from megatron_dta.training.checkpoint.random_state import seed_random_states
        from megatron_dta.training.optimizer.build import TrainingOptimizer

        destroy_parallel()
        device = initialize_parallel(stretch.seed, stretch.parallel)
        seed_random_states(stretch.seed)
        self.config = TrainConfig(model=stretch.model, optimization=stretch.rates, parallel=stretch.parallel)
        self.model = build_model(stretch.model, device, stretch.parallel)
        self.optimizer = TrainingOptimizer(self.model, stretch.rates, stretch.parallel)
        self.mesh = current_mesh()
        self.iteration = 0

    def step(self, poison: float = 0.0) -> bool:
        """Pull every weight towards the number of the step; whether the step was applied."""
        self.iteration += 1
        self.optimizer.zero_grad()
        from megatron.core import parallel_state

        expert_replicas = parallel_state.get_expert_data_parallel_world_size()
        terms = [
            ((parameter.float() - self.iteration) ** 2).sum()
            / (self.mesh.data_size if getattr(parameter, "allreduce", True) else expert_replicas)
            for parameter in self.model.parameters()
        ]
        loss = sum(terms) + poison * terms[0]
        loss.backward()
        return self.optimizer.step(1.0).applied

    def save(self, folder: Path) -> None:
        from megatron_dta.training.checkpoint.save_load import save_base, save_checkpoint

        save_base(replace(self.config, checkpoint=CheckpointConfig(save=str(folder))), self.model)
        save_checkpoint(folder, self.config, self.model, self.optimizer, self.iteration, {})

    def load(self, folder: Path) -> list[str]:
        from megatron_dta.training.checkpoint.files import find_checkpoint
        from megatron_dta.training.checkpoint.save_load import load_checkpoint

        self.iteration, _, changed = load_checkpoint(find_checkpoint(folder), self.config, self.model, self.optimizer)
        return changed


def run_stretches(rank: int, stretches: list[Stretch]) -> list[dict[str, Any]]:
    """Every stretch in turn: what changed since the checkpoint, and random numbers drawn after it."""
    results = []
    for stretch in stretches:
        part = Rank(stretch)
        changed = part.load(stretch.load) if stretch.load is not None else []
        for _ in range(stretch.steps):
            part.step()
        part.save(stretch.save)
        results.append({"changed": changed, "drawn": [float(torch.rand(())), np.random.rand(), random.random()]})
    return results


@contextmanager
def small_files_only(on_this_rank: bool) -> Any:
    """Writing to a file beyond 1000 bytes fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if on_this_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)


def fail_on_a_rank(rank: int, stretch: Stretch) -> list[str]:
    """Saves that fail on one rank after the other, at once and in the background; each rank's messages."""
    from megatron_dta.training.checkpoint.save_load import CheckpointSaver

    part = Rank(stretch)
    part.step()
    part.save(stretch.save)
    messages = []
    for background in (False, True):
        settings = replace(part.config.checkpoint, save=str(stretch.save), async_save=background)
        config = replace(part.config, checkpoint=settings)
        for broken in range(part.mesh.world_size):
            saver = CheckpointSaver(config, part.model, part.optimizer)
            with small_files_only(rank == broken):
                try:
                    saver.save(2, {})
                    saver.finish()
                    messages.append("no failure")
                except InputError as error:
                    messages.append(str(error))
            part.mesh.wait_for_all()
            messages.append((stretch.save / "latest_checkpointed_iteration.txt").read_text())
            messages.append(str((stretch.save / "iter_0000002").exists()))
            part.mesh.wait_for_all()
    part.iteration = 3
    part.save(stretch.save)
    return messages


def hold_writers() -> threading.Event:
    """Threads that write checkpoints wait for the event."""
    from megatron_dta.training.checkpoint import writer as checkpoint_writer

    release = threading.Event()

    class Held(threading.Thread):
        def run(self) -> None:
            release.wait()
            super().run()

    checkpoint_writer.threading = types.SimpleNamespace(Thread=Held)
    return release


def save_in_background(rank: int, stretch: Stretch) -> dict[str, Any]:
    """Train on while a held writer waits; then let it write. What the folder showed at each moment."""
    from megatron_dta.training.checkpoint.save_load import CheckpointSaver

    release, seen = hold_writers(), {}
    part = Rank(stretch)
    part.step()
    settings = replace(part.config.checkpoint, save=str(stretch.save), async_save=True, keep_checkpoints=2)
    part.config, lines = replace(part.config, checkpoint=settings), []
    saver = CheckpointSaver(part.config, part.model, part.optimizer, lines.append)
    tracker = stretch.save / "latest_checkpointed_iteration.txt"
    saver.save(1, {})
    part.step()
    saver.poll()
    part.mesh.wait_for_all()
    seen["held"] = (tracker.exists(), sorted(path.name for path in stretch.save.iterdir()), list(lines))
    if rank == 0:
        release.set()
        with suppress(AttributeError):
            saver._pending[1]._thread.join()
    saver.poll()
    part.mesh.wait_for_all()
    seen["one rank done"] = (tracker.exists(), list(lines))
    release.set()
    saver.finish()
    seen["finished"] = (tracker.read_text(), list(lines))
    for iteration in (2, 3, 4):
        saver.save(iteration, {})
        part.step()
    saver.finish()
    seen["all"] = (tracker.read_text(), sorted(path.name for path in stretch.save.iterdir()))
    return seen


def poison_one_rank(rank: int, stretch: Stretch) -> list[bool]:
    """Whether steps were applied, the second of which has a gradient that is not finite on the last rank alone."""
    part = Rank(stretch)
    last = rank == part.mesh.world_size - 1
    applied = [part.step(), part.step(float("nan") if last else 0.0), part.step(), part.step(1e300 if last else 0.0)]
    applied.append(part.step())
    part.save(stretch.save)
    return applied


def save_every_way(rank: int, stretches: list[Stretch]) -> None:
    """After some steps the same state: by all data-parallel ranks, at once and in the background, and by the first."""
    from megatron_dta.training.checkpoint.save_load import CheckpointSaver

    for stretch in stretches:
        part = Rank(stretch)
        for _ in range(stretch.steps):
            part.step()
        for name, parallel, background in (("first", False, False), ("all", True, False), ("later", True, True)):
            settings = CheckpointConfig(
                save=str(stretch.save / name), async_save=background, ckpt_fully_parallel_save=parallel
            )
            saver = CheckpointSaver(replace(part.config, checkpoint=settings), part.model, part.optimizer)
            saver.save(part.iteration, {})
            if background:
                part.step()  # which must not be seen in what is written
            saver.finish()
            part.mesh.wait_for_all()
