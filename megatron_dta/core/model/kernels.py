"""Decides whether Triton kernels run instead of plain PyTorch, and draws tokens with them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dta_kernels.recurrence.contract import Recurrence
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    if find_spec("triton") is None:
        return False
    from dta_kernels.tree_attention.common import interpreted

    return interpreted()


def choose_triton(flag: str, impl: str, device: torch.device, refusal: str | None) -> bool:
    """Whether the Triton kernels run, rather than the reference.

    Args:
        flag: name of the flag, for messages.
        impl: "triton", "reference", or "auto": Triton on a CUDA device if its kernels support the inputs.
        refusal: why the kernels do not support the inputs; None if they do.

    Raises:
        InputError: "triton" is requested and cannot run.
    """
    if impl not in ("auto", "triton", "reference"):
        raise InputError(f"{flag} {impl}: choose one of auto, triton, reference")
    if impl == "reference" or (impl == "auto" and device.type != "cuda"):
        return False
    if refusal is None and find_spec("triton") is None:
        refusal = ": Triton is not installed; install it (pip install triton) or use reference"
    if refusal is not None:
        if impl == "auto":
            return False
        raise InputError(f"{flag} triton{refusal}")
    if device.type != "cuda" and not is_interpreted():
        raise InputError(
            f"{flag} triton needs a CUDA GPU; use auto or reference, or, to test on a CPU, Triton's interpreter "
            "(environment variable TRITON_INTERPRET=1)"
        )
    return True


def choose_fused_layers(impl: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether layers are built on the fused kernels (``fused_layer``), see ``choose_triton``."""
    refusal = None
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        refusal = (
            f" takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}; use auto or reference"
        )
    return choose_triton("fused_layer_impl", impl, device, refusal)


def choose_recurrence(model: ModelConfig, device: torch.device, plain: Recurrence, name: str) -> Recurrence:
    """``plain`` or the library's function ``name``, as ``recurrence_impl`` says.

    Raises:
        InputError: "fla", or "auto" on a GPU in 16 bits, and the package is missing, too old, or compiled wrongly
            by this Triton for this GPU; or "fla" elsewhere.
    """
    from dta_kernels.recurrence import library

    impl = model.recurrence_impl
    has_kernels = device.type == "cuda" and model.params_dtype in library.DTYPES
    if impl == "reference" or (impl == "auto" and not has_kernels):
        return plain
    flag, version = f"recurrence_impl {impl}", library.installed_version()
    oldest = ".".join(map(str, library.OLDEST))
    fix = f"install it (pip install 'megatron_dta[hybrid]' or '{library.PACKAGE}>={oldest}') or give reference"
    if not has_kernels:
        raise InputError(f"{flag} needs a CUDA GPU and --bf16; use auto or reference")
    if version is None:
        raise InputError(f"{flag}: {library.PACKAGE} is not installed; {fix}")
    if not library.is_supported(version):
        raise InputError(f"{flag}: {library.PACKAGE} has version {version}, which is older than {oldest}; {fix}")
    wrong = library.why_triton_is_wrong(torch.cuda.get_device_capability(device))
    if wrong is not None:
        raise InputError(f"{flag}: {library.PACKAGE}: {wrong}, or give reference")
    return getattr(library, name)


def draw_by_kernels(
    model: Any, hidden_BC: Tensor, noise_B: Tensor, temperature: float, num_drawn: int
) -> tuple[Tensor, Tensor]:
    """A token of each row (int64 [B]) and its logprob (float32 [B]), see ``dta_kernels.logprobs.draw_tokens``.

    model: a ``Model``.
    """
    # Triton is installed wherever this is called.
    from dta_kernels.logprobs.draw_tokens import draw_from_shards, draw_tokens

    shard = model.vocabulary_shard
    if shard is None:
        return draw_tokens(model.logits(hidden_BC), noise_B, temperature, num_drawn)
    logits_BV, size = model.own_logits(hidden_BC)
    sizes = size, max(0, min(size, num_drawn - shard.first_token))
    return draw_from_shards(logits_BV, sizes, noise_B, temperature, shard)
