"""The kinds of layers beside plain attention: each is a folder of ``megatron_dta.families``, imported where it is used.

This table is the one place that names them. A folder has the modules

    sizes         ``Sizes``, a ``core.shapes.mixer.Mixer``; needs no torch
    layer         ``spec()``, Megatron's spec of the layer, and ``use_kernels``, see ``core.model.build``
    reference     ``Plain``, the layer for one whole sequence, with which the tree is compared
    huggingface   ``FAMILIES``, ``RULES``, ``settings``, ``config`` and ``dimensions``, see ``training.huggingface``
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from megatron_dta.core.shapes.mixer import Mixer

# The Hugging Face architectures of each.
FOLDERS: Mapping[str, tuple[str, ...]] = {
    "gated_delta_net": ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    "mamba2": ("NemotronHForCausalLM",),
    "latent_attention": ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
}


def part_of(kind: str, module: str) -> ModuleType:
    """A module of the folder of a kind of layer."""
    return import_module(f"megatron_dta.families.{kind}.{module}")


def mixer_of(settings: Mapping[str, Any]) -> Mixer:
    """The sizes that ``settings`` has by name, beside the ``kind``. A setting that it lacks has its default.

    Raises:
        ValueError: there is no such kind.
    """
    sizes = dict(settings)
    kind = sizes.pop("kind", None)
    if kind not in FOLDERS:
        raise ValueError(f"the kind of layer {kind} is not one of {', '.join(FOLDERS)}")
    return part_of(kind, "sizes").Sizes(**sizes)
