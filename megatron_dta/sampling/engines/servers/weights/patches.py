"""The values of a model that have changed since they were last sent, and checksums of what servers should then have.

A step with a small learning rate changes few of the values that bfloat16 can tell apart. A patch has them by their flat
index in the Hugging Face tensor; to apply it twice does no harm.

Checksums are SHA-256 of a parameter's bytes, by the server's own names, in which q, k and v are one parameter and so
are gate and up. Not every parameter of a server has the bytes of the trainer's: it may be a part of one, packed or
quantized. Those that have them after the whole set was sent must have them after a patch, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dta.sampling.engines.servers.weights.host_weights import Bucket, HostWeights

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 1 << 26
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


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
    """Checksums of the parameters that servers name so, after an optional place ("tp0:"), if the model has them."""
    found, known = {}, {}
    for name in names:
        own = name.rpartition(":")[2]
        if own not in known:
            known[own] = _checksum(weights.tensors, own)
        if known[own] is not None:
            found[name] = known[own]
    return found


def _checksum(tensors: Mapping[str, Tensor], name: str) -> str | None:
    parts = [name]
    for fused, each in _FUSED.items():
        if f".{fused}." in name:
            parts = [name.replace(f".{fused}.", f".{part}.") for part in each]
    if not all(part in tensors for part in parts):
        return None
    digest = hashlib.sha256()
    for part in parts:
        digest.update(tensors[part].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
