"""Loads and saves Hugging Face checkpoints in training, on any mesh (``--load-hf`` and ``--save-hf``).

Each rank reads its own parts of the weights. For saving, rank 0 gathers one parameter at a time, see ``folder``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.training.checkpoint.finished import check_export, note_export
from megatron_dta.training.checkpoint.writer import refusing_on_all
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config
from megatron_dta.training.huggingface.config.config_output import config_from_settings, write_template
from megatron_dta.training.huggingface.config.end_token import name_end_token
from megatron_dta.training.huggingface.files import carried_in, prefix_in
from megatron_dta.training.huggingface.folder import write_folder
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.weights import HfWeights


def hf_weights(config: TrainConfig, model: torch.nn.Module, without_head: bool = False) -> HfWeights:
    """The weights of the run's model under Hugging Face's names, see ``HfWeights``."""
    family = architecture(_hf_config(config))
    chunks = list(getattr(model, "model_chunks", [model]))
    shape, prefix = ModelShape.of(config.model), prefix_in(_given(config))
    return HfWeights(chunks, family.architecture, shape, current_mesh().host_group, without_head, prefix)


def load_hf(config: TrainConfig, model: torch.nn.Module, without_head: bool = False) -> None:
    """Load the weights of ``--load-hf``; an input error on one rank is raised on all ranks.

    Args:
        without_head: keep the initial values of the output layer (value models).
    """
    with refusing_on_all():
        hf_weights(config, model, without_head).load(config.checkpoint.load_hf)


def check_save_hf(config: TrainConfig) -> None:
    """Check before the run that ``--save-hf`` can be written at its end.

    Raises:
        InputError: the folder exists, no Hugging Face architecture fits the model, or tensors that the export is to
            hold unchanged are missing.
    """
    if config.checkpoint.save_hf is not None:
        check_export(config)
        carried_text_of(config)
        try:
            _hf_config(config)
        except InputError as error:
            raise InputError(f"--save-hf: {error}") from error


def carried_text_of(config: TrainConfig) -> str | None:
    """How many tensors lie beside the run's text model in its Hugging Face folder; None if none does."""
    folder = _given(config)
    return None if folder is None else carried_in(Path(folder))


def save_hf(config: TrainConfig, model: torch.nn.Module, iteration: int, end_id: int | None = None) -> Path:
    """Write the folder ``--save-hf``, which names the end token ``end_id`` if given. Every rank must call this."""
    target = Path(config.checkpoint.save_hf)

    def complete(folder: Path) -> None:
        if end_id is not None:
            name_end_token(folder, end_id)
        note_export(config, iteration, folder)

    write_hf(config, model, target, "--save-hf", complete)
    return target


def write_hf(
    config: TrainConfig,
    model: torch.nn.Module,
    target: Path,
    flag: str,
    before_naming: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the folder ``target`` of the run's model, see ``write_folder``. Every rank must call this."""
    with _template(config) as template:
        write_folder(template, hf_weights(config, model), target, flag, before_naming)


def _given(config: TrainConfig) -> str | None:
    return config.checkpoint.load_hf or config.checkpoint.hf_checkpoint


def _hf_config(config: TrainConfig) -> dict[str, Any]:
    """The config.json of the run's model: the given one, or one derived from the settings."""
    folder = _given(config)
    if folder is not None:
        return read_hf_config(folder)
    # The vocabulary size is unknown until the tokenizer is read; any value serves for the check.
    size = config.model.vocab_size or 1
    return config_from_settings(replace(config.model, vocab_size=size))


@contextmanager
def _template(config: TrainConfig) -> Iterator[Path]:
    """A folder that holds the configuration and the tokenizer files."""
    folder = _given(config)
    if folder is not None:
        yield Path(folder)
        return
    with TemporaryDirectory() as made:
        write_template(Path(made), _hf_config(config), config.sampling.tokenizer_model)
        yield Path(made)
