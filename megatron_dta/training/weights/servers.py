"""Writes weights for rollout servers: one Hugging Face checkpoint per version, in a folder shared with the servers.

A version's folder gets its final name when it is complete. It is deleted when the servers have loaded a later version,
and all versions are deleted when the run ends. There are therefore at most two. If the servers run on the same machine,
a folder in memory (``/dev/shm``) avoids disk writes.
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
    """The weight folders of one run. Folders left by an earlier killed run are deleted.

    Raises:
        InputError: the folder cannot be created.
    """

    def __init__(self, config: TrainConfig, model: torch.nn.Module) -> None:
        self._config, self._model = config, model
        self._folder = weights_folder(config)
        if current_mesh().rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"--rollout-weights-dir {self._folder}: cannot be created ({error.strerror or error})"
                ) from error
            self._delete(lambda version: True)

    def write(self, version: int) -> Path:
        """See ``sampling.sources.rank0_source.WeightsWriter``."""
        target = self._folder / f"weights-{version}"
        write_hf(self._config, self._model, target, "--rollout-weights-dir")
        return target

    def delete_before(self, version: int) -> None:
        """See ``sampling.sources.rank0_source.WeightsWriter``."""
        self._delete(lambda found: found < version)

    def close(self) -> None:
        """See ``sampling.sources.rank0_source.WeightsWriter``."""
        self._delete(lambda version: True)

    def _delete(self, chosen: Callable[[int], bool]) -> None:
        for path in self._folder.iterdir():
            name = _NAME.match(path.name)
            if name and chosen(int(name[1])):
                shutil.rmtree(path, ignore_errors=True)


def weights_folder(config: TrainConfig) -> Path:
    """The folder of the checkpoints for servers."""
    given = config.sampling.rollout_weights_dir
    return Path(given) if given is not None else Path(config.checkpoint.save) / "rollout-weights"
