"""Saves and restores all random states of a process for checkpoints.

Sampling and shuffling use keyed generators without state. Other code, such as a user's reward function, may draw from
the global generators: torch (CPU and GPU), numpy, Python's ``random``, and Megatron's tracker.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from megatron_dta.core.model.parallel.mesh import current_mesh


def seed_random_states(seed: int) -> None:
    """Seed numpy's and Python's generators; ``mesh.initialize_parallel`` seeds torch's and Megatron's.

    Each data-parallel replica gets its own state, so that, for example, a user's reward draws different numbers there.
    """
    seed += current_mesh().data_rank
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_random_state() -> dict[str, Any]:
    """Return the states as tensors and plain values, which load without unpickling objects."""
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached_gaussian)],
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss_next],
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore captured states. The GPU's state is restored only if both runs have a GPU."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, position, has_gauss, cached_gaussian = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss_next))
    if state["tracker"]:
        tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
