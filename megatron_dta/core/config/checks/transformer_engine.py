"""Checks the settings of Transformer Engine and FP8, and whether the machine supports them.

``check_transformer_impl`` and ``check_fp8`` read the settings; the first also requires the package to be installed.
``check_fp8_support`` inspects the GPU.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.parallel import ParallelConfig

# Widths of FP8 products must be multiples of these: 16 in any case, and whole blocks where a block shares a scale.
FP8_UNITS = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}
# The scales of a row depend on that row alone, so a token's forward does not depend on the rest of its segment.
DEFAULT_FP8_RECIPE = "blockwise"
# Minimum compute capability and CUDA version of each recipe.
_NEEDS = {"tensorwise": ((8, 9), (12, 1)), "mxfp8": ((10, 0), (12, 8)), "blockwise": ((9, 0), (12, 9))}


def check_transformer_impl(model: ModelConfig) -> None:
    """Reject Transformer Engine if it is not installed, for experts, and for dtypes that it computes less exactly."""
    if model.transformer_impl == "local":
        return
    flag = f"--transformer-impl {model.transformer_impl}"
    if model.num_experts is not None:
        raise InputError(f"{flag} does not support experts (--num-experts); use local")
    if model.params_dtype != torch.bfloat16:
        raise InputError(f"{flag} needs --bf16: it rounds the factors of float32 products to TF32; add it or use local")
    if find_spec("transformer_engine") is None:
        raise InputError(
            f"{flag}: Transformer Engine is not installed; install it (pip install transformer_engine[pytorch]) or use "
            "local"
        )


def check_fp8(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse settings of FP8 that do not fit together."""
    if model.fp8_format is None:
        return
    if model.transformer_impl != "transformer_engine":
        raise InputError("--fp8-format needs --transformer-impl transformer_engine and that package; leave it out")
    if model.num_experts is not None:
        raise InputError("--fp8-format with --num-experts is not supported; leave one of the two out")
    if model.params_dtype != torch.bfloat16:
        raise InputError("--fp8-format needs --bf16; add it")
    recipe = model.fp8_recipe or DEFAULT_FP8_RECIPE
    unit, ranks = FP8_UNITS[recipe], parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    widths = {
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size over the tensor ranks": model.ffn_hidden_size / ranks,
        "query heads times --kv-channels over the tensor ranks": heads * model.kv_channels / ranks,
        "query, key and value heads times --kv-channels over the tensor ranks": (heads + 2 * groups)
        * model.kv_channels
        / ranks,
    }
    for name, width in widths.items():
        if width % unit:
            raise InputError(
                f"--fp8-recipe {recipe} needs widths in multiples of {unit}: {name} is {width:g}; "
                + ("leave --fp8-format out" if recipe == "tensorwise" else "give tensorwise, or leave --fp8-format out")
            )


def check_fp8_support(model: ModelConfig) -> None:
    """Raise ``InputError`` for a recipe that this GPU does not support."""
    if model.fp8_format is None:
        return
    recipe = model.fp8_recipe or DEFAULT_FP8_RECIPE
    capability, cuda = _NEEDS[recipe]
    flag = f"--fp8-format {model.fp8_format} with --fp8-recipe {recipe}"
    if not torch.cuda.is_available():
        raise InputError(f"{flag} needs a CUDA GPU, and there is none; leave --fp8-format out")
    if torch.cuda.get_device_capability() < capability:
        needed, present = (".".join(map(str, version)) for version in (capability, torch.cuda.get_device_capability()))
        raise InputError(f"{flag} needs compute capability {needed}, this GPU has {present}; give another --fp8-recipe")
    if tuple(map(int, torch.version.cuda.split(".")[:2])) < cuda:
        raise InputError(f"{flag} needs CUDA {cuda[0]}.{cuda[1]}, PyTorch has {torch.version.cuda}; give tensorwise")
