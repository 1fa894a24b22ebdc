"""Weights on their way to rollout servers: a Hugging Face checkpoint for each version, in a folder that they share.

A version's folder gets its name when it is whole. It is deleted when the servers have loaded a later one, and all are
when the run ends, so there are two at most; on one machine a folder in memory (``/dev/shm``) saves the disk.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_dta.common.errors import InputError
from megatron_dta.config import TrainConfig
from megatron_dta.model import current_mesh
from megatron_dta.training.weights.huggingface import write_hf

_NAME = re.compile(r"weights-(\d+)(\.unfinished)?$")


class RolloutWeights:
    """The folders of one run; those of an earlier run that was killed are deleted.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(self, config: TrainConfig, model: torch.nn.Module) -> None:
        self._config, self._model = config, model
        self._folder = weights_folder(config)
        if current_mesh().rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"--rollout-weights-dir {self._folder}: cannot be made ({error.strerror or error})"
                ) from error
            self._delete(lambda version: True)

    def write(self, version: int) -> Path:
        """See ``sampling.rank0.WeightsWriter``."""
        target = self._folder / f"weights-{version}"
        write_hf(self._config, self._model, target, "--rollout-weights-dir")
        return target

    def delete_before(self, version: int) -> None:
        """See ``sampling.rank0.WeightsWriter``."""
        self._delete(lambda found: found < version)

    def close(self) -> None:
        """See ``sampling.rank0.WeightsWriter``."""
        self._delete(lambda version: True)

    def _delete(self, chosen: Callable[[int], bool]) -> None:
        for path in self._folder.iterdir():
            name = _NAME.match(path.name)
            if name and chosen(int(name[1])):
                shutil.rmtree(path, ignore_errors=True)


def weights_folder(config: TrainConfig) -> Path:
    """Where the checkpoints for servers go."""
    given = config.sampling.rollout_weights_dir
    return Path(given) if given is not None else Path(config.checkpoint.save) / "rollout-weights"
