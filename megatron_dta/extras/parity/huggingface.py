"""Builds the same model in Hugging Face transformers: configuration, and weights or gradients under its names.

The mapping of names (``training.huggingface.mappings``) only rearranges rows, so it applies to gradients as well as to
weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.parity.huggingface_experts import experts_are_stacked, stack_experts
from megatron_dta.extras.parity.outcome import Outcome
from megatron_dta.extras.parity.references import Objective, run_one_by_one
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config, text_model
from megatron_dta.training.huggingface.config.config_output import huggingface_config
from megatron_dta.training.huggingface.mappings import ModelShape, parameters_of


def build_huggingface(
    model: ModelConfig, weights: dict[str, Tensor], config: dict[str, Any] | None = None
) -> torch.nn.Module:
    """transformers' model with Megatron's ``weights``, in float32 and with its plain attention.

    Args:
        model: settings of ``weights``.
        weights: all of Megatron's parameters by name.
        config: a config.json; by default the result of ``huggingface_config`` for ``model``.
    """
    config = config or huggingface_config(model)
    reference = empty_huggingface(config)
    renamed = to_huggingface(weights, model, architecture(config).architecture)
    named = {name: tensor.float() for name, tensor in renamed.items()}
    if not model.untie_embeddings_and_output_weights:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    reference.load_state_dict(named, strict=True)
    return reference.to(next(iter(weights.values())).device)


def empty_huggingface(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' causal language model of a config.json, freshly initialized in float32, with plain attention."""
    transformers = _import_transformers()
    # A copy, because transformers modifies the dictionary.
    values = copy.deepcopy({key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")})
    settings = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    settings._attn_implementation = "eager"
    settings.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(settings).float()


def load_huggingface(folder: str | Path) -> torch.nn.Module:
    """transformers' text model of a checkpoint folder, in float64, with plain attention; only safetensors are read.

    Raises:
        InputError: transformers is missing or cannot load the folder.
    """
    transformers = _import_transformers()
    from safetensors import SafetensorError  # comes with transformers

    tied = text_model(read_hf_config(folder)).get("tie_word_embeddings")
    try:
        config = _text_config(transformers, folder)
        # Beside a vision tower, transformers looks for it in the configuration of the text model only.
        config.tie_word_embeddings = config.tie_word_embeddings if tied is None else tied
        config._experts_implementation = "eager"  # grouped products do not take float64
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float64,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.double()  # some classes keep routers in float32
        return model
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder}: Hugging Face transformers cannot load it: {reason}") from error


def _text_config(transformers: ModuleType, folder: str | Path) -> Any:
    """The settings of the text model, of which those that only transformers obeys have no effect."""
    values = read_hf_config(folder)
    family = architecture(values)
    if values.get("model_type") in family.published_as:
        # transformers does not know every name that folders with code of their own have.
        mapped = transformers.CONFIG_MAPPING[family.model_type]
        config = mapped.from_dict(values | {"model_type": family.model_type})
    else:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "time_step_min"):
        config.time_step_min = 1e-12  # see families.mamba2.huggingface
    return config.get_text_config()


def train_padding(reference: torch.nn.Module) -> int | None:
    """Give every row of the embedding its gradient, as in training here.

    transformers computes none for the row of ``pad_token_id``.

    Returns:
        The number of that row; None if there is none.
    """
    embedding = reference.get_input_embeddings()
    row, embedding.padding_idx = embedding.padding_idx, None
    return row


def _import_transformers() -> ModuleType:
    try:
        import transformers
    except ImportError:
        raise InputError("the reference needs Hugging Face transformers: pip install 'megatron_dta[parity]'") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def to_huggingface(tensors: dict[str, Tensor], model: ModelConfig, family: str | None = None) -> dict[str, Tensor]:
    """Megatron's parameters (or their gradients) under Hugging Face's names.

    Raises ``KeyError`` with the name of a tensor that has no counterpart there.

    Args:
        family: Hugging Face's architecture, by default that of ``huggingface_config``.
    """
    family = family or huggingface_config(model)["architectures"][0]
    by_name = {parameter.name: parameter for parameter in parameters_of(family, ModelShape.of(model))}
    renamed = {new: piece for name, tensor in tensors.items() for new, piece in by_name[name].split(tensor).items()}
    return stack_experts(renamed) if model.num_experts is not None and experts_are_stacked() else renamed


def run_huggingface(
    model: ModelConfig,
    weights: dict[str, Tensor],
    samples: Sequence[TrainingSample],
    objective: Objective,
    temperature: float = 1.0,
) -> Outcome:
    """Train ``samples`` one by one on Hugging Face's model in float32; gradients carry its parameter names."""
    reference = build_huggingface(model, weights)

    def logits_of(token_ids: Tensor) -> Tensor:
        return reference(input_ids=token_ids, use_cache=False).logits[0]

    return run_one_by_one(reference, logits_of, samples, objective, temperature, "token-mean")
