"""Loads Hugging Face tensors into a model on a mesh, and iterates over the model's weights as Hugging Face tensors.

A rank holds parts of some parameters (those of its pipeline stage and its experts). Loading reads only the bytes of
these parts. Iteration yields either the rank's shards of the Hugging Face tensors, without any communication, or all
whole tensors in the order of the model, one parameter at a time. It serves weight updates of inference servers, and
saving. Iteration merges LoRA adapters into the weights; loading fills the base weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.huggingface.files import SafetensorsFolder, Shapes
from megatron_dta.training.huggingface.mappings import ModelShape, parameters_of, tensors_of
from megatron_dta.training.huggingface.parameters import PREFIX, Parameter, Part, Sharding

_EXPERT = re.compile(r"local_experts\.(\d+)\.")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_ADAPTER, _EXPERT_BIAS = "_adapter.lora_", ".router.expert_bias"
_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_HF_OUTPUTS = ("lm_head.weight", "language_model.lm_head.weight")


class Adapter(Protocol):
    """A LoRA adapter of the model layer."""

    def merged(self, weight: Tensor) -> Tensor:
        """``weight`` with the adapter added to it, in at least float32."""


class HeldPart(NamedTuple):
    """The part of a parameter that this rank holds.

    Attributes:
        rank, size: position among the ranks that divide the parameter; (0, 1) if it is not divided.
        values: the model's weights, of the part's shape, not copied.
        is_copy: whether this is the last stage's copy of a tied embedding.
        adapter: the adapter that is merged into the weights on export.
        read: reads the weights where ``values`` holds none (on the meta device).
    """

    parameter: Parameter
    part: Part
    rank: int
    size: int
    values: Tensor
    is_copy: bool
    adapter: Adapter | None
    read: Callable[[], Tensor] | None = None

    def exported(self) -> Tensor:
        """The weights with the adapter, merged in float32 and rounded to their dtype."""
        values = self.values.detach() if self.read is None else self.read()
        values = values if self.adapter is None else self.adapter.merged(values)
        return values.to(self.values.dtype)


@dataclass(frozen=True)
class HfShard:
    """A rectangle of a Hugging Face tensor.

    Attributes:
        shape: shape of the whole tensor.
        offsets: start of ``values`` in the whole tensor, along each axis.
        values: a copy of the weights or the weights themselves; do not modify them.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


class HfWeights:
    """The weights of a model on the mesh, as Hugging Face tensors.

    Args:
        chunks: this rank's model chunks, one for each of its (virtual) pipeline stages.
        architecture: Hugging Face's name of the architecture, such as "LlamaForCausalLM".
        host_group: group of all ranks for objects on the host (gloo); None uses the default group.
        without_head: leave out the output layer, which in a value model is not the checkpoint's.
        prefix: what the names of the yielded tensors begin with, see ``files.text_prefix``.

    Raises:
        InputError: the model has a parameter that the architecture does not.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        architecture: str,
        shape: ModelShape,
        host_group: ProcessGroup | None = None,
        without_head: bool = False,
        prefix: str = PREFIX,
    ) -> None:
        self._architecture, self._shape, self._host_group = architecture, shape, host_group
        self.parameters = parameters_of(architecture, shape, prefix)
        self._exported = [
            parameter for parameter in self.parameters if not (without_head and parameter.name == _OUTPUT)
        ]
        by_name = {parameter.name: parameter for parameter in self.parameters}
        self.held = [
            self._held(name, values, adapter, by_name)
            for chunk in chunks
            for name, values, adapter in _global_names(chunk)
            # Other architectures have no place for a bias that balances the load in training.
            if not (without_head and name == _OUTPUT) and (name in by_name or not name.endswith(_EXPERT_BIAS))
        ]

    def load(self, folder: str | Path) -> None:
        """Load the rank's weights from a checkpoint; they keep their dtype.

        Raises:
            InputError: the checkpoint is damaged or of another model. In this case no weight has changed.
        """
        reader = SafetensorsFolder(folder)
        parameters = parameters_of(self._architecture, self._shape, reader.prefix)
        check_tensors(reader, parameters, self._shape)
        by_name = {parameter.name: parameter for parameter in parameters}
        with torch.no_grad():
            for held in self.held:
                direct = held.values.is_cpu and held.values.is_contiguous()
                host = held.values.detach() if direct else torch.empty(held.part.shape, dtype=held.values.dtype)
                read_part(reader, by_name[held.parameter.name], held.part, host)
                if not direct:
                    held.values.copy_(host)

    def iterate_shards(self) -> Iterator[HfShard]:
        """Yield this rank's shards of Hugging Face tensors in the order of its layers, without communication."""
        for held in self.held:
            if not held.is_copy:
                yield from _shards_of(held)

    def iterate_places(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, HfShard | None]]:
        """Yield name, shape and dtype of every tensor of the model in one order on all ranks, with this rank's shard.

        The shard is None on ranks that hold no part of the tensor or only a copy of another rank's part. Every rank
        must call this; the ranks exchange names only.
        """
        owners = self._owners()
        dtypes = {name: dtype for (name, _), (_, dtype) in owners.items()}
        rank = torch.distributed.get_rank()
        sent = {
            held.parameter.name: held
            for held in self.held
            if not held.is_copy and owners[held.parameter.name, held.rank][0] == rank
        }
        for parameter in self._exported:
            held = sent.get(parameter.name)
            shards_held = list(_shards_of(held)) if held is not None else []
            shards = {shard.name: shard for shard in shards_held}
            if len(shards) < len(shards_held):
                raise InputError(
                    f"{parameter.name}: a tensor-parallel rank holds several parts of one Hugging Face tensor, which "
                    "this weight update cannot send; use --tensor-model-parallel-size 1"
                )
            for name, shape in parameter.tensors.items():
                yield name, shape, dtypes[parameter.name], shards.get(name)

    def shapes(self) -> Shapes:
        """Shape and dtype of every tensor that ``iterate`` yields, in the same order. Every rank must call this."""
        dtypes = {name: dtype for (name, _), (_, dtype) in self._owners().items()}
        return {
            name: (shape, dtypes[parameter.name])
            for parameter in self._exported
            for name, shape in parameter.tensors.items()
        }

    def iterate(self, to_all: bool = True, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole tensor of the model. Every rank must iterate to the end.

        One parameter at a time is gathered, so the additional memory is twice the size of the largest parameter.

        Args:
            to_all: False yields tensors on rank 0 only, and nothing on the others.
            names: tensors to yield; by default all.
        """
        owners = self._owners()
        of_rank = {(held.parameter.name, held.rank): held for held in self.held if not held.is_copy}
        sizes: dict[str, int] = {}
        for name, rank in owners:
            sizes[name] = max(sizes.get(name, 0), rank + 1)
        device = self.held[0].values.device if self.held else torch.device("cpu")
        for parameter in self._exported:
            if names is not None and not any(name in names for name in parameter.tensors):
                continue
            tensors: dict[str, Tensor] = {}
            for rank in range(sizes[parameter.name]):
                source, dtype = owners[parameter.name, rank]
                part = self._part(parameter, rank, sizes[parameter.name])
                held = of_rank.get((parameter.name, rank))
                sends = held is not None and source == torch.distributed.get_rank()
                values = _transfer(held.exported() if sends else None, part, source, dtype, device, to_all)
                if values is not None:
                    _place(parameter, part, values, tensors)
            yield from ((name, values) for name, values in tensors.items() if names is None or name in names)

    def _owners(self) -> dict[tuple[str, int], tuple[int, torch.dtype]]:
        """The process that sends each part of a parameter (the first replica), and the part's dtype."""
        mine = [(held.parameter.name, held.rank, held.values.dtype) for held in self.held if not held.is_copy]
        world = torch.distributed.get_world_size()
        everybody: list[list[tuple[str, int, torch.dtype]]] = [mine] * world
        if world > 1:
            torch.distributed.all_gather_object(everybody, mine, group=self._host_group)
        owners: dict[tuple[str, int], tuple[int, torch.dtype]] = {}
        for process, parts in enumerate(everybody):
            for name, rank, dtype in parts:
                owners.setdefault((name, rank), (process, dtype))
        return owners

    def _held(self, name: str, values: Tensor, adapter: Adapter | None, by_name: dict[str, Parameter]) -> HeldPart:
        is_copy = name == _OUTPUT and name not in by_name
        parameter = by_name.get(_EMBEDDING if is_copy else name)
        if parameter is None:
            raise InputError(f"the model's parameter {name} has no place in the Hugging Face architecture")
        rank, size = _place_among_ranks(parameter)
        part = self._part(parameter, rank, size)
        values = values.squeeze(1) if parameter.is_filter else values
        if part.shape != tuple(values.shape):
            raise InputError(
                f"the model's parameter {name} has the shape {list(values.shape)}, not {list(part.shape)} as in the "
                "Hugging Face architecture"
            )
        return HeldPart(parameter, part, rank, size, values, is_copy, adapter)

    def _part(self, parameter: Parameter, rank: int, size: int) -> Part:
        return parameter.part_of_rank(rank, size, self._shape.padded_vocab_size(size))


def _shards_of(held: HeldPart) -> Iterator[HfShard]:
    shapes = held.parameter.tensors
    column = () if held.part.columns is None else (held.part.columns[0],)
    column = (0, *column) if held.parameter.is_filter else column
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    exported = held.exported()
    for copy in held.parameter.copies(held.part):
        rows = exported[copy.row : copy.row + copy.rows]
        pieces.setdefault(copy.tensor, []).append((copy.tensor_row, rows))
    for name, rows_of_tensor in pieces.items():
        # A rank's heads are consecutive, so its rows of a tensor are, too, except those of a tensor with sections.
        for row, values in _joined(rows_of_tensor):
            values = values.unsqueeze(1) if held.parameter.is_filter else values
            yield HfShard(name, shapes[name], (row, *column), values)


def _joined(pieces: list[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Rows of a tensor, each with its first row, where consecutive pieces are concatenated."""
    pieces = sorted(pieces, key=lambda piece: piece[0])
    first = 0
    for last, (row, values) in enumerate(pieces, start=1):
        if last == len(pieces) or pieces[last][0] != row + len(values):
            run = [rows for _, rows in pieces[first:last]]
            yield pieces[first][0], run[0] if len(run) == 1 else torch.cat(run)
            first = last


def _global_names(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor, Adapter | None]]:
    """Parameters of a model chunk, and biases of experts, with the numbers of layers and experts in the whole model,
    and their adapters."""
    modules = dict(chunk.named_modules())
    layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    matches = (_EXPERT.search(name) for name, _ in chunk.named_parameters())
    experts = [int(match[1]) for match in matches if match]
    first_expert = parallel_state.get_expert_model_parallel_rank() * (max(experts, default=-1) + 1)
    biases = ((name, values) for name, values in chunk.named_buffers() if name.endswith(_EXPERT_BIAS))
    for name, values in chain(chunk.named_parameters(), biases):
        if _ADAPTER in name:
            continue
        adapter = modules.get(name.removesuffix(".weight") + "_adapter") if name.endswith(".weight") else None
        name = _LAYER.sub(lambda match: f"decoder.layers.{layers[int(match[1])]}.", name)
        name = _EXPERT.sub(lambda match: f"local_experts.{first_expert + int(match[1])}.", name)
        yield name, values, adapter


def _place_among_ranks(parameter: Parameter) -> tuple[int, int]:
    if parameter.sharding is Sharding.WHOLE:
        return 0, 1
    if parameter.expert is not None:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _transfer(
    sent: Tensor | None, part: Part, source: int, dtype: torch.dtype, device: torch.device, to_all: bool
) -> Tensor | None:
    """Send a part to all ranks or only to rank 0; returns None on ranks that do not receive it."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    receives = to_all or rank == 0
    if source == rank:
        values = sent.contiguous()
    else:
        values = torch.empty(part.shape, dtype=dtype, device=device) if receives else None
    if world > 1 and to_all:
        torch.distributed.broadcast(values, source)
    elif world > 1 and source != 0:
        if rank == source:
            torch.distributed.send(values, 0)
        elif rank == 0:
            torch.distributed.recv(values, source)
    return values if receives else None


def _place(parameter: Parameter, part: Part, values: Tensor, tensors: dict[str, Tensor]) -> None:
    """Copy a part's rows into the Hugging Face tensors, which are created as needed."""
    columns = slice(None) if part.columns is None else slice(*part.columns)
    for copy in parameter.copies(part):
        rows = values[copy.row : copy.row + copy.rows]
        if copy.tensor not in tensors:
            tensors[copy.tensor] = values.new_empty(parameter.tensors[copy.tensor])
        target = tensors[copy.tensor][copy.tensor_row : copy.tensor_row + copy.rows]
        if part.columns is None:
            target.copy_(rows)
        else:
            target.flatten(1)[:, columns] = rows


def read_part(reader: SafetensorsFolder, parameter: Parameter, part: Part, into: Tensor) -> None:
    """Fill ``into``, a host tensor of the part's shape, with a part of a parameter."""
    for copy in parameter.copies(part):
        reader.read(copy.tensor, copy.tensor_row, into[copy.row : copy.row + copy.rows], part.columns)
    parameter.zero_padding(part, into)


def check_tensors(reader: SafetensorsFolder, parameters: list[Parameter], shape: ModelShape) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of the model, apart from carried ones."""
    tied = not shape.untie_embeddings_and_output_weights
    embedding = f"{reader.prefix}embed_tokens.weight"
    repeated = [name for name in _HF_OUTPUTS if tied and name in reader.tensors]
    reader.check(tensors_of(parameters), lambda name: name in repeated)
    for name in repeated:
        if not torch.equal(reader.tensor(name), reader.tensor(embedding)):
            raise InputError(
                f"{reader.folder}: {name} differs from {embedding}, but config.json ties them; "
                'correct "tie_word_embeddings"'
            )
