"""Reads and writes the safetensors files of Hugging Face checkpoints, for training and for the converters.

Files are opened with ``safetensors.safe_open``, which checks their headers; slices of rows and columns are read from
them. Reading cannot execute code. ``pytorch_model.bin`` is a pickle, which can, so it is refused.

Published folders also hold tensors beside the text model: a vision tower, or heads that predict several tokens. These
are carried: not loaded or trained, and copied unchanged when the trained model is exported. Experts may be stacked:
``experts.gate_up_proj`` [experts, 2 * width, hidden] and ``experts.down_proj`` [experts, hidden, width] hold the
matrices of the single experts, which are read and written under the names that other checkpoints give them.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.huggingface.parameters import PREFIX

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
# What names of the text model's tensors begin with: beside a vision tower the first ones.
_PREFIXES = ("model.language_model.", "language_model.model.", PREFIX, "backbone.", "")
# Dtypes that weights may have.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Heads for several tokens, vision towers, and buffers that old versions of transformers saved; and what marks a layer
# behind the last one as such a head.
_NEXT_TOKEN = re.compile(r"(?P<part>model\.layers\.\d+\.)eh_proj\.weight")
_CARRIED = re.compile(r"(?P<part>(model\.)?(mtp|visual)\.).*|.*\.(?P<buffer>rotary_emb\.inv_freq)")
# Last parts of the names of tensors that only quantized checkpoints have.
_QUANTIZED = re.compile(
    r".*[._](weight_scale(_inv|_2)?|input_scale|weight_(packed|shape|zero_point|g_idx)|qweight|qzeros|scales|g_idx|absmax)"
)
_STACK = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<matrix>gate_up|down)_proj")
_MATRIX = re.compile(r"(?P<experts>.*\.mlp\.experts)\.\d+\.(?P<matrix>gate|up|down)_proj\.weight")
_MOST_SHOWN = 200
# Rows of about this size are read at a time, so that little memory is needed beside the target.
_BUFFER_BYTES = 1 << 25

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor.

    Attributes:
        dtype: safetensors' name of the dtype.
        stack: name of the tensor that stacks it with those of other experts, its expert, and its first row there.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    stack: tuple[str, int, int] | None = None


class SafetensorsFolder:
    """The tensors of a checkpoint folder, by name. Stacked experts are single matrices here.

    Args:
        folder: holds ``model.safetensors.index.json`` and the files it names, or ``model.safetensors``.

    Raises:
        InputError: a file is missing, damaged, or differs from the index; the message names it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.weight_map = _weight_map(self.folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._carried = carried_parts(self.weight_map)
        # A file's pages count as resident memory while it is open.
        self._open = lru_cache(maxsize=2)(open_file)
        for file in sorted(set(self.weight_map.values())):
            opened = self._open(self.folder / file)
            listed = {name for name, of_name in self.weight_map.items() if of_name == file}
            for name in sorted(listed ^ set(opened.keys())):
                fault = f"has no tensor {shown(name)}, which" if name in listed else f"has {shown(name)}, unknown to"
                raise InputError(f"{self.folder / file}: {fault} {INDEX}{' places there' * (name in listed)}")
            for name in listed:
                part = opened.get_slice(name)
                stored = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
                self.tensors |= {name: stored} if name in self._carried else _unstacked(name, stored)

    @property
    def prefix(self) -> str:
        """See ``text_prefix``."""
        return text_prefix(self.weight_map)

    def check(self, expected: dict[str, tuple[int, ...]], ignored: Callable[[str], bool] = lambda name: False) -> None:
        """Refuse a checkpoint whose tensors differ from ``expected`` in name or shape or are not of a weight dtype."""
        quantized = [name for name in self.tensors if _QUANTIZED.fullmatch(name) and name not in self._carried]
        if quantized:
            raise InputError(
                f"{self.folder}: holds quantized weights ({shown(quantized[0])}), which cannot be trained; use the "
                "checkpoint in bfloat16 or float32"
            )
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            raise InputError(f"{self.folder}: {_some(missing)} missing; the model in config.json needs it")
        known = expected.keys() | self._carried.keys()
        surplus = [name for name in self.tensors if name not in known and not ignored(name)]
        if surplus:
            raise InputError(f"{self.folder}: {_some(surplus)} not known to the architecture in config.json")
        for name, shape in expected.items():
            stored = self.tensors[name]
            if stored.dtype not in DTYPES:
                raise InputError(
                    f"{self.folder / stored.file}: {name} is of type {stored.dtype}; weights must be one of "
                    f"{', '.join(DTYPES)} (not quantized)"
                )
            if stored.shape != shape:
                raise InputError(
                    f"{self.folder / stored.file}: {name} has the shape {list(stored.shape)}; config.json says "
                    f"{list(shape)}"
                )

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the tensors, as far as weights may have them."""
        return {DTYPES[stored.dtype] for stored in self.tensors.values() if stored.dtype in DTYPES}

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a weight, after ``check``."""
        return DTYPES[self.tensors[name].dtype]

    def read(self, name: str, row: int, into: Tensor, columns: tuple[int, int] | None = None) -> None:
        """Fill ``into`` [rows, ...] with the tensor's rows starting at ``row``, restricted to ``columns`` if given.

        ``into`` may have another dtype.
        """
        stored = self.tensors[name]
        stack, *expert, first = stored.stack or (name, 0)
        part = self._open(self.folder / stored.file).get_slice(stack)
        step = max(1, _BUFFER_BYTES // max(1, into[0].nbytes))
        inner = [] if columns is None or len(stored.shape) != 2 else [slice(*columns)]
        for start in range(0, into.shape[0], step):
            rows = into[start : start + step]
            begin = first + row + start
            values = part[tuple([*expert, slice(begin, begin + rows.shape[0]), *inner])]
            rows.copy_(values.reshape(rows.shape))

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, as it is stored."""
        return self._open(self.folder / self.weight_map[name]).get_tensor(name)


def open_file(path: Path) -> Any:
    """Open a safetensors file.

    Raises:
        InputError: it is missing or damaged.
    """
    if not path.exists():
        raise InputError(f"{path}: missing; download the checkpoint again")
    if not path.is_file():
        # Reading a pipe would block forever.
        raise InputError(f"{path}: is not a file; download the checkpoint again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        reason = shown(" ".join(str(error).split()))
        raise InputError(f"{path}: truncated or not a safetensors file ({reason}); download it again") from error


def _unstacked(name: str, stored: StoredTensor) -> dict[str, StoredTensor]:
    """The matrices in a tensor that stacks experts, or the tensor itself."""
    stack = _STACK.fullmatch(name)
    if stack is None or len(stored.shape) != 3:
        return {name: stored}
    parts = ("gate", "up") if stack["matrix"] == "gate_up" else ("down",)
    experts, rows, columns = stored.shape[0], stored.shape[1] // len(parts), stored.shape[2]
    return {
        f"{stack['experts']}.{expert}.{part}_proj.weight": StoredTensor(
            stored.file, stored.dtype, (rows, columns), (name, expert, index * rows)
        )
        for expert in range(experts)
        for index, part in enumerate(parts)
    }


def text_prefix(names: Iterable[str]) -> str:
    """What the names of the text model's tensors begin with; ``PREFIX`` if none of ``names`` tells."""
    known = set(names)
    embeddings = ("embed_tokens.weight", "embeddings.weight")
    return next((prefix for prefix in _PREFIXES if any(prefix + name in known for name in embeddings)), PREFIX)


def prefix_in(folder: str | Path | None) -> str:
    """``text_prefix`` of a folder's tensors."""
    return PREFIX if folder is None else text_prefix(weight_map_of(Path(folder)))


def carried_parts(names: Iterable[str]) -> dict[str, str]:
    """The tensors among ``names`` that lie beside the text model, which is all that is trained, each with its part."""
    all_names = list(names)
    heads = tuple(match["part"] for match in map(_NEXT_TOKEN.fullmatch, all_names) if match)
    parts = {}
    for name in all_names:
        carried = _CARRIED.fullmatch(name)
        if carried is not None:
            parts[name] = f"{carried['part']}*" if carried["part"] else carried["buffer"]
        elif name.startswith(heads):
            parts[name] = f"{next(head for head in heads if name.startswith(head))}*"
    return parts


def carried_text(names: Iterable[str]) -> str | None:
    """How many of these tensors are carried, and of which parts; None if none is."""
    parts = sorted(Counter(carried_parts(names).values()).items())
    counted = [f"{count} tensor{'s' if count > 1 else ''} {part}" for part, count in parts]
    return ", ".join(counted) or None


def carried_in(folder: Path) -> str | None:
    """``carried_text`` of a folder's tensors; none if it has no safetensors files.

    Raises:
        InputError: a file that holds some of them is missing or damaged.
    """
    weight_map = weight_map_of(folder)
    files = {name: weight_map[name] for name in carried_parts(weight_map)}
    text = carried_text(weight_map)
    try:
        for file in sorted(set(files.values())):
            open_file(folder / file)
    except InputError as error:
        raise InputError(f"{error}; tensors in it are exported unchanged: {text}") from None
    return text


def shown(value: object) -> str:
    """A name or a value from a file, shortened for a message."""
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def weight_map_of(folder: Path) -> dict[str, str]:
    """The file of every tensor; empty if there are no readable safetensors files."""
    try:
        return _weight_map(folder)
    except InputError:
        return {}


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return dict.fromkeys(open_file(folder / SINGLE).keys(), SINGLE)
        others = next((path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern)), None)
        if others is not None:
            raise InputError(
                f"{folder}: has no safetensors; {others} is a pickle, which can run code and is not read. Save the "
                "model as safetensors first"
            )
        raise InputError(f"{folder}: has neither {SINGLE} nor {INDEX}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {tensor: str(name) for tensor, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: is damaged: it has no readable weight_map") from error
    for name in set(named.values()):
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable():
            raise InputError(f"{index}: names the file {shown(name)!r}; only safetensors files beside it are read")
    return named


def _some(names: Iterable[str]) -> str:
    """The first names and the number of further ones, for a message."""
    listed = [shown(name) for name in names]
    more = f" and {len(listed) - 3} more tensors" if len(listed) > 3 else ""
    return f"{', '.join(listed[:3])}{more} {'is' if len(listed) == 1 else 'are'}"


def lay_out(tensors: Shapes, template: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """Divide tensors into files like another checkpoint, or into files of 5 GB.

    Args:
        tensors: shapes and dtypes by name, in the order of the model.
        template: the file of each tensor of the other checkpoint, which also has the carried tensors; may be empty.

    Returns:
        For every file its tensors, each with the tensors that it consists of: itself, the matrices that it stacks, or
        none if it is carried.

    Raises:
        InputError: the other checkpoint lacks a tensor.
    """
    parts: dict[str, list[str]] = {name: [] for name in carried_parts(template)}
    for name in tensors:
        parts.setdefault(_stack_of(name) if _stack_of(name) in template else name, []).append(name)
    files: dict[str, dict[str, list[str]]] = {}
    if template:
        for name, of_name in parts.items():
            if name not in template:
                raise InputError(f"the model has {name}, which the Hugging Face folder given for its files lacks")
            files.setdefault(template[name], {})[name] = of_name
        return dict(sorted(files.items()))
    shards: list[dict[str, list[str]]] = [{}]
    size = 0
    for name, (shape, dtype) in tensors.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size + count > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = [name]
        size += count
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    return dict(zip(names, shards, strict=True))


def _stack_of(name: str) -> str:
    """Name of the tensor that would stack the matrix ``name``; ``name`` itself if it is none of an expert."""
    matrix = _MATRIX.fullmatch(name)
    return name if matrix is None else f"{matrix['experts']}.{'down' if matrix['matrix'] == 'down' else 'gate_up'}_proj"


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file and flush it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        reason = re.search(r"I/O error: (.*?)(?: \(os error|$)", str(error))
        raise OSError(reason[1] if reason else str(error)) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    # The library gives files to their owner alone.
    path.chmod(0o644)


def stacked(name: str, parts: list[Tensor]) -> Tensor:
    """The tensor ``name`` that stacks matrices of experts, or the only one of ``parts``."""
    stack = _STACK.fullmatch(name)
    if stack is None or name.endswith(".weight"):
        return parts[0]
    experts = len(parts) // (2 if stack["matrix"] == "gate_up" else 1)
    return torch.cat(parts).reshape(experts, -1, parts[0].shape[1])
