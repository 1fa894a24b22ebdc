"""Writes the weights of a model as a Hugging Face folder, for ``--save-hf`` and for ``convert-megatron-to-hf``.

Configuration, tokenizer and all other files are copied from a template, a Hugging Face folder of the same model. If it
has weights, they determine the division into files, and tensors beside the text model, such as a vision tower, are
copied too. Rank 0 holds one file at a time in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import new_folder
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.training.checkpoint.writer import refusing_on_all
from megatron_dta.training.huggingface.config.values import CONFIG_FILE
from megatron_dta.training.huggingface.files import (
    INDEX,
    SINGLE,
    Shapes,
    lay_out,
    open_file,
    stacked,
    weight_map_of,
    write_file,
)
from megatron_dta.training.huggingface.weights import HfWeights

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json", ".py")


def write_folder(
    template: Path,
    weights: HfWeights,
    target: Path,
    flag: str,
    before_naming: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the folder ``target`` atomically. Every rank must call this.

    Args:
        flag: the flag that error messages name.
        before_naming: called with the complete folder before it is renamed to ``target``.

    Raises:
        InputError: the folder exists or cannot be written; raised on all ranks.
    """

    def on_rank0(act: Callable[..., Any], *arguments: Any) -> Any:
        result = None
        with refusing_on_all():
            if current_mesh().rank == 0:
                try:
                    result = act(*arguments)
                except OSError as error:
                    raise InputError(f"{flag} {target}: cannot be written ({error.strerror or error})") from error
        return result

    shapes, weight_map, sizes = weights.shapes(), weight_map_of(template), {}
    files = lay_out(shapes, weight_map)

    def write(file: str, tensors: dict[str, Tensor]) -> None:
        content = {
            name: stacked(name, [tensors.pop(part) for part in parts])
            if parts
            else open_file(template / weight_map[name]).get_tensor(name)
            for name, parts in files[file].items()
        }
        sizes.update({name: values.nbytes for name, values in content.items()})
        write_file(folder / file, content)

    def finish() -> None:
        _write_surroundings(template, folder, shapes)
        if list(files) != [SINGLE]:
            _write_index(template, folder, files, sum(sizes.values()))
        before_naming(folder)

    with ExitStack() as stack:
        folder = on_rank0(lambda: stack.enter_context(new_folder(target)))
        for file, content in files.items():
            names = {part for parts in content.values() for part in parts}
            on_rank0(write, file, {name: values.cpu() for name, values in weights.iterate(to_all=False, names=names)})
        on_rank0(finish)
        on_rank0(stack.close)


def _write_surroundings(template: Path, folder: Path, shapes: Shapes) -> None:
    """Copy all files of the template but its weights, and write the dtype of the weights into config.json."""
    weights = tuple(ending for ending in _WEIGHTS if ending != ".py" or not _names_code(template))
    for path in template.iterdir():
        if path.is_file() and not path.name.endswith(weights) and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    counts: dict[torch.dtype, int] = {}
    for shape, dtype in shapes.values():
        counts[dtype] = counts.get(dtype, 0) + torch.Size(shape).numel()
    name = str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    holders = [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]
    wrong = [(holder, key) for holder in holders for key in ("dtype", "torch_dtype") if holder.get(key, name) != name]
    for holder, key in wrong:
        holder[key] = name
    if wrong:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _names_code(template: Path) -> bool:
    """Whether config.json names code in the folder, without which others may be unable to read the folder."""
    return "auto_map" in json.loads((template / CONFIG_FILE).read_text(encoding="utf-8"))


def _write_index(template: Path, folder: Path, files: dict[str, dict[str, list[str]]], total: int) -> None:
    """Write the index of the weight files, or copy the template's if it says the same."""
    weight_map = {name: file for file, content in files.items() for name in content}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    try:
        given = json.loads((template / INDEX).read_text(encoding="utf-8"))
        same = given["weight_map"] == weight_map and given["metadata"]["total_size"] == total
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        same = False
    if same:
        shutil.copyfile(template / INDEX, folder / INDEX)
    else:
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
