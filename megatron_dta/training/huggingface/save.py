"""Loads and saves Hugging Face checkpoints in training, on any mesh (``--load-hf`` and ``--save-hf``).

Each rank reads its own parts of the weights. For saving, rank 0 gathers one parameter at a time, writes it to a folder
with a temporary name, and renames the folder when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model import current_mesh
from megatron_dta.training.checkpoint.finished import check_export, note_export
from megatron_dta.training.checkpoint.writer import refuse_on_all
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config
from megatron_dta.training.huggingface.config.config_output import config_from_settings, write_template
from megatron_dta.training.huggingface.config.end_token import name_end_token
from megatron_dta.training.huggingface.files import carried_tensors, carried_text, prefix_in
from megatron_dta.training.huggingface.job import check_target
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.safetensors_output import FileLayout, SafetensorsOutput
from megatron_dta.training.huggingface.to_huggingface import lay_out_like, write_surroundings
from megatron_dta.training.huggingface.weights import HfWeights

_UNFINISHED = ".unfinished"


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
    error = None
    try:
        hf_weights(config, model, without_head).load(config.checkpoint.load_hf)
    except InputError as caught:
        error = caught
    refuse_on_all(error)


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
    return None if folder is None else carried_text(carried_tensors(Path(folder)))


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
    """Write the folder ``target`` atomically. Every rank must call this.

    Args:
        flag: the flag that error messages name.
        before_naming: called with the complete folder before it is renamed to ``target``.
    """
    with _template(config) as template:
        _write_like(template, hf_weights(config, model), target, flag, before_naming)


def _write_like(
    template: Path, weights: HfWeights, target: Path, flag: str, before_naming: Callable[[Path], None]
) -> None:
    shapes, writer, error = weights.shapes(), None, None
    if current_mesh().rank == 0:
        try:
            writer = _FolderWriter(target, lay_out_like(template, shapes, None), flag)
        except InputError as caught:
            error = caught
    refuse_on_all(error)
    with ExitStack() as files:
        # After a failure on rank 0 the iteration continues, since it is collective.
        for name, values in weights.iterate(to_all=False):
            error = error or writer.attempt(lambda name=name, values=values: writer.write(name, values, files))
        if writer is not None:
            error = error or writer.attempt(lambda: writer.finish(template, before_naming, files))
    refuse_on_all(error)


class _FolderWriter:
    """Writes the files of one folder on rank 0; the folder appears only when it is complete."""

    def __init__(self, target: Path, layouts: list[FileLayout], flag: str) -> None:
        self._target, self._layouts, self._flag = target, layouts, flag
        self._folder = target.with_name(target.name + _UNFINISHED)
        self._layout_of = {tensor: layout for layout in layouts for tensor in layout.shapes}
        self._outputs: dict[str, SafetensorsOutput] = {}

    def attempt(self, act: Callable[[], None]) -> InputError | None:
        """Run ``act``; if it fails, delete the folder and return the error."""
        try:
            act()
        except (OSError, InputError) as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, InputError):
                return error
            return InputError(f"{self._flag} {self._target}: cannot be written ({error.strerror or error})")
        return None

    def write(self, name: str, values: Tensor, files: ExitStack) -> None:
        """Write one tensor; ``files`` closes the opened files."""
        if not self._outputs:
            check_target(self._target)
            # Remove the leftovers of a killed run.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        self._output(self._layout_of[name], files).write(name, 0, values.cpu())

    def _output(self, layout: FileLayout, files: ExitStack) -> SafetensorsOutput:
        if layout.name not in self._outputs:
            self._outputs[layout.name] = files.enter_context(SafetensorsOutput(self._folder, layout))
        return self._outputs[layout.name]

    def finish(self, template: Path, before_naming: Callable[[Path], None], files: ExitStack) -> None:
        """Add copied tensors, the configuration and the tokenizer files and rename the folder."""
        for layout in self._layouts:
            self._output(layout, files).finish()
        write_surroundings(template, self._folder, self._layouts)
        before_naming(self._folder)
        os.replace(self._folder, self._target)


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
        write_template(Path(made) / "template", _hf_config(config), config.sampling.tokenizer_model)
        yield Path(made) / "template"
