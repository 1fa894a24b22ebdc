"""Reads Megatron's distributed checkpoints safely.

Damaged checkpoints and those that other users may write are refused, and no code in a checkpoint is executed. The
checksums are compared first (``integrity``); each rank reads its share of the files. Megatron then loads the
shards; the pickles among the files are read by ``restricted_pickle`` and PyTorch's weights-only unpickler.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.training.checkpoint.files import TRACKER
from megatron_dta.training.checkpoint.integrity import refuse_foreign_checkpoint, verify_checksums
from megatron_dta.training.checkpoint.restricted_pickle import read_metadata
from megatron_dta.training.checkpoint.writer import reason_of, refusing_on_all

# Errors that Megatron's and PyTorch's readers raise on damaged files; CheckpointException is not an ``Exception``.
READ_ERRORS = (Exception, CheckpointException)


def check_files(path: Path, wanted: bool = True) -> None:
    """Refuse a checkpoint that has changed since it was saved, or that others may write. Every rank must call this.

    Args:
        wanted: False (``--skip-checkpoint-checks``) skips the checks.
    """
    if not wanted:
        return
    mesh = current_mesh()
    with refusing_on_all():
        refuse_foreign_checkpoint(path)
        verify_checksums(path, (mesh.rank, mesh.world_size))


def read_common(path: Path) -> dict[str, Any]:
    """The checkpoint's common state, which is stored next to the shards."""
    megatron_patches.read_checkpoints_without_running_them(read_metadata)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    if not isinstance(common, dict):
        raise InputError(f"{path}: its common state is a {type(common).__name__}, which no checkpoint has")
    return common


def saved_settings(path: Path, common: dict[str, Any]) -> dict[str, Any] | None:
    """The settings by flag in a checkpoint's common state; None if another project wrote the checkpoint.

    Raises:
        InputError: the settings do not have this project's format.
    """
    if "megatron_dta" not in common:
        return None
    try:
        settings = json.loads(common["megatron_dta"]["settings"])
    except (KeyError, TypeError, ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise InputError(f"{path}: its settings cannot be read; was it changed after it was written?")
    return settings


def read_checkpoint(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Load the shards that ``wanted`` describes; the result has the structure of ``wanted``."""
    megatron_patches.read_checkpoints_without_running_them(read_metadata)
    try:
        return dist_checkpointing.load(wanted, str(path))
    except READ_ERRORS as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: BaseException) -> InputError:
    """The error about a checkpoint that a reader failed on."""
    return InputError(
        f"{path}: the checkpoint cannot be read ({reason_of(error)}); write the number of an earlier one to {TRACKER}"
    )
