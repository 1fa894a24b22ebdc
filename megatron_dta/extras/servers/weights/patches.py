"""The values of a model that have changed since they were last sent, and checksums of what servers should then have.

A step with a small learning rate changes few of the values that bfloat16 can tell apart. A patch lists them by their
flat index in the Hugging Face tensor; applying it twice does no harm.

Checksums are SHA-256 of a parameter's bytes, by the server's own names, in which q, k and v are one parameter and so
are gate and up. With tensor parallelism each process has some rows of these, of the embedding and of the output layer,
some columns of the matrices that write to the residual stream, and all of the rest. Not every parameter of a server has
the bytes of the trainer's: it may be packed, padded or quantized. Those that have them after the whole set was sent
must have them after a patch, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dta.sampling.host_weights import Bucket, HostWeights

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 1 << 26
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ROWS, _COLUMNS = ("embed_tokens.weight", "lm_head.weight"), (".o_proj.weight", ".down_proj.weight")
_RANK = re.compile(r"(?:^|:)tp(\d+):")


@dataclass(frozen=True)
class Patch:
    """New values of one tensor.

    Attributes:
        indices: int32 [changed], of the flat tensor; on the host.
        values: [changed].
    """

    name: str
    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor

    @property
    def dtype_name(self) -> str:
        """The dtype as servers name it, such as "bfloat16"."""
        return str(self.values.dtype).removeprefix("torch.")


def patches_of(bucket: Bucket, base: Bucket | None, device: torch.device) -> list[Patch]:
    """The tensors of a bucket that differ from those of ``base`` in any bit; without it all, whole.

    Args:
        device: where they are compared, a part at a time, since training needs its memory.
    """
    found = []
    for name, values in bucket.tensors.items():
        flat = values.view(-1)
        if base is None:
            found.append(Patch(name, tuple(values.shape), torch.arange(flat.numel(), dtype=torch.int32), flat))
            continue
        indices = _changed(flat, base.tensors[name].view(-1), device)
        if indices.numel():
            found.append(Patch(name, tuple(values.shape), indices, flat[indices]))
    return found


def _changed(left: Tensor, right: Tensor, device: torch.device) -> Tensor:
    """Where two flat tensors differ: int32, on the host."""
    words, found = _WORDS[left.dtype.itemsize], [torch.zeros(0, dtype=torch.int32)]
    for start in range(0, left.numel(), _PART):
        parts = (each[start : start + _PART].to(device, non_blocking=True).view(words) for each in (left, right))
        found.append((torch.ne(*parts).nonzero().view(-1) + start).int().cpu())
    return torch.cat(found)


def expected_checksums(weights: HostWeights, names: Iterable[str]) -> dict[str, str]:
    """Checksums of the parameters of one server, under these names, after an optional prefix ("tp0:"), if the model has
    them.
    """
    places = {name: _RANK.search(name) for name in names}
    ranks = {name: int(place[1]) if place else 0 for name, place in places.items()}
    size = 1 + max(ranks.values(), default=0)
    found = {}
    for name, rank in ranks.items():
        parts = _parts(weights.tensors, name.rpartition(":")[2], rank, size)
        if parts:
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part.contiguous().view(-1).view(torch.uint8).numpy())
            found[name] = digest.hexdigest()
    return found


def _parts(tensors: Mapping[str, Tensor], name: str, rank: int, size: int) -> list[Tensor]:
    """What a process has of the tensors that a server's parameter joins; empty if the model lacks one."""
    names = [name]
    for fused, each in _FUSED.items():
        if f".{fused}." in name:
            names = [name.replace(f".{fused}.", f".{part}.") for part in each]
    if not all(each in tensors for each in names):
        return []
    found = [tensors[each] for each in names]
    if size == 1 or (len(names) == 1 and not name.endswith((*_ROWS, *_COLUMNS))):
        return found
    dim = 1 if name.endswith(_COLUMNS) else 0
    if any(each.shape[dim] % size for each in found):
        return []
    return [each.chunk(size, dim)[rank] for each in found]
