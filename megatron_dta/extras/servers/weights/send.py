"""Writes weights for rollout servers: a Hugging Face checkpoint in a folder shared with them, or a copy on the host.

**Folder.** A version's folder gets its final name when it is complete. It is deleted when the servers have loaded a
later version, and all versions are deleted when the run ends. There are therefore at most two, or three with
``--rollout-max-staleness``. If the servers run on the same machine, a folder in memory (``/dev/shm``) avoids disk
writes.

**Copy on the host.** All ranks send their parts to the first rank, one parameter at a time, which keeps them in its
host memory, converted to Hugging Face tensors and packed into buckets. Training continues as soon as the copy is
complete. The engine sends it to the servers when they are between two batches, and again to servers that return later.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.sampling.host_weights import HostWeights, empty_weights
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.huggingface.save import hf_weights, write_hf

# Weights travel to the servers in buckets of this size.
BUCKET_BYTES = 512 << 20
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
        self._delete(lambda held: held < version)

    def close(self) -> None:
        """See ``sampling.sources.rank0_source.WeightsWriter``."""
        self._delete(lambda version: True)

    def _delete(self, chosen: Callable[[int], bool]) -> None:
        for path in self._folder.iterdir():
            name = _NAME.match(path.name)
            if name and chosen(int(name[1])):
                shutil.rmtree(path, ignore_errors=True)


class HeldWeights:
    """The weights of one run in the host memory of the first rank, in which every server can be given them.

    The memory of a version that is no longer needed is used for the next one, so there are at most two copies, or
    three with ``--rollout-max-staleness``.

    Raises:
        InputError: a GPU is to send the weights of a model that is not on one, or nccl4py is missing.
    """

    def __init__(self, config: TrainConfig, model: torch.nn.Module) -> None:
        self._config, self._model = config, model
        self._on_gpu = next(model.parameters()).is_cuda
        way = config.sampling.rollout_weight_transfer
        if way in ("nccl", "ipc") and not self._on_gpu:
            raise InputError(f"--rollout-weight-transfer {way} needs a GPU; on CPUs give folder, or gloo with sglang")
        if way == "nccl" and config.sampling.rollout_engine == "vllm" and find_spec("nccl") is None:
            raise InputError(
                "--rollout-weight-transfer nccl reaches vLLM through nccl4py, which is missing: pip install nccl4py, "
                "or give --rollout-weight-transfer folder"
            )
        self._held: dict[int, HostWeights] = {}
        self._free: list[HostWeights] = []

    def write(self, version: int) -> HostWeights | None:
        """See ``sampling.sources.rank0_source.WeightsWriter``."""
        weights = hf_weights(self._config, self._model)
        shapes = weights.shapes()
        first = current_mesh().rank == 0
        target = self._room(shapes) if first else None
        for name, values in weights.iterate(to_all=False):
            target.tensors[name].copy_(values, non_blocking=True)
        if not first:
            return None
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self._held[version] = target
        return target

    def delete_before(self, version: int) -> None:
        """See ``sampling.sources.rank0_source.WeightsWriter``."""
        for old in [old for old in self._held if old < version]:
            self._free.append(self._held.pop(old))

    def close(self) -> None:
        """See ``sampling.sources.rank0_source.WeightsWriter``."""
        self._held.clear()
        self._free.clear()

    def _room(self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> HostWeights:
        if self._free:
            return self._free.pop()
        return empty_weights(shapes, BUCKET_BYTES, pinned=self._on_gpu)


def rollout_weights(config: TrainConfig, model: torch.nn.Module) -> RolloutWeights | HeldWeights:
    """Writes weights in the way of ``--rollout-weight-transfer``."""
    return (RolloutWeights if config.sampling.rollout_weight_transfer == "folder" else HeldWeights)(config, model)


def weights_folder(config: TrainConfig) -> Path:
    """The folder of the checkpoints for servers."""
    folder = config.sampling.rollout_weights_dir
    return Path(folder) if folder is not None else Path(config.checkpoint.save) / "rollout-weights"
