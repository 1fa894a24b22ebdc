"""Turns verl's settings into this project's ``TrainConfig``; a setting that would change the result and has no
counterpart here is refused by its name.

Settings of verl that only say how a backend divides its work do not apply and are not read: micro-batch sizes and
``max_token_len_per_gpu`` (the planner cuts trees into segments and keeps one path in memory),
``use_remove_padding`` (padding is always removed), ``use_fused_kernels`` and ``use_torch_compile`` (the kernels are
this project's), and ``enable_gradient_checkpointing`` (``tree_memory_gib`` or ``tree_activation_tokens`` decide what
is recomputed).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, McoreOptimizerConfig, OptimizerConfig

from megatron_dta.core.common.errors import InputError
from megatron_dta.integrations.verl.config import MegatronDtaEngineConfig
from megatron_dta.training.arguments import settings_from
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.checks.all import check_engine
from megatron_dta.training.config.train import settings_of

# Settings of verl's engine whose names and meanings are the same here.
_SAME = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "tree_mode",
    "tree_segment_tokens",
    "tree_memory_tokens",
    "tree_activation_tokens",
    "tree_memory_gib",
    "seed",
)
_DTYPES = ("bfloat16", "float32", "float64")
# Parts of a checkpoint in Hugging Face's format.
_HF_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")


def train_config(
    model: HFModelConfig, engine: MegatronDtaEngineConfig, optimizer: OptimizerConfig | None
) -> TrainConfig:
    """The settings of one engine.

    Args:
        optimizer: None for an engine that only computes logprobs.

    Raises:
        InputError: a setting is not supported; the message names it.
    """
    if engine.dtype not in _DTYPES:
        raise _refused("engine.dtype", engine.dtype, f"choose from {', '.join(_DTYPES)}")
    if engine.router_replay.mode != "disabled":
        raise _refused("engine.router_replay.mode", engine.router_replay.mode, "set it to disabled")
    named: dict[str, Any] = {name: getattr(engine, name) for name in _SAME if getattr(engine, name) is not None}
    named |= _model_settings(model)
    if optimizer is not None:
        named |= _optimizer_settings(optimizer)
    named["num_virtual_stages_per_pipeline_rank"] = engine.virtual_pipeline_model_parallel_size or 1
    # As in verl's Megatron engine, the default is switched off where there is nothing to divide.
    named["sequence_parallel"] = engine.sequence_parallel and engine.tensor_model_parallel_size > 1
    named["bf16"] = engine.dtype == "bfloat16"
    named["deterministic_mode"] = engine.full_determinism
    folder = _local_folder(model)
    named |= {"load_hf": folder, "hf_checkpoint": folder} | dict(engine.override_settings)
    config = settings_from(named)
    targets, known = named.get("lora_target_modules") or (), config.model.lora_targets
    if set(targets) - set(known):
        raise _refused("model.target_modules", targets, f"choose all-linear or from {', '.join(known)}")
    overrides = {*engine.override_settings, *(getattr(optimizer, "override_optimizer_config", None) or {})}
    unknown = overrides - {setting.name for _, setting, _ in settings_of(config)}
    if unknown:
        raise InputError(f"engine.override_settings, optim.override_optimizer_config: no setting {sorted(unknown)[0]}")
    if engine.dtype == "float64":
        config = replace(config, model=replace(config.model, params_dtype=torch.float64))
    check_engine(config)
    return config


def _model_settings(model: HFModelConfig) -> dict[str, Any]:
    for name, value in model.override_config.items():
        if name != "attn_implementation" and not (name.endswith(("dropout", "pdrop")) and not value):
            raise _refused(f"model.override_config.{name}", value, "change config.json instead")
    for name in ("lora_adapter_path", "target_parameters", "exclude_modules", "use_liger", "enable_activation_offload"):
        if getattr(model, name):
            raise _refused(f"model.{name}", getattr(model, name), "leave it out")
    if model.mtp.enable:
        raise _refused("model.mtp.enable", True, "multi-token prediction is not trained here; set it to False")
    if model.tiled_mlp.get("enabled"):
        raise _refused("model.tiled_mlp.enabled", True, "set it to False")
    rank = model.lora_rank or model.lora.get("rank", 0)
    if not rank:
        return {}
    if not model.lora.get("merge", False):
        raise _refused("model.lora.merge", False, "rollout servers get the merged weights; add model.lora.merge=True")
    alpha = model.lora.get("alpha", model.lora_alpha) if model.lora.get("rank") else model.lora_alpha
    targets = model.lora.get("target_modules", "all-linear") if model.lora.get("rank") else model.target_modules
    adapters = {"lora_rank": int(rank), "lora_alpha": float(alpha)}
    if targets == "all-linear":
        return adapters
    if isinstance(targets, str):
        raise _refused("model.target_modules", targets, "give all-linear, or a list of modules")
    return adapters | {"lora_target_modules": list(targets)}


def _optimizer_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    steps, warmup = optimizer.total_training_steps, optimizer.lr_warmup_steps
    if warmup is None or warmup < 0:
        warmup = int(optimizer.lr_warmup_steps_ratio * max(0, steps))
    if steps <= 0:
        steps = warmup + 1  # verl knows the number only in training
    named = {
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "clip_grad": optimizer.clip_grad,
        "train_iters": steps,
        "lr_warmup_iters": warmup,
    }
    if isinstance(optimizer, McoreOptimizerConfig):
        return named | _megatron_optimizer(optimizer)
    if isinstance(optimizer, FSDPOptimizerConfig):
        return named | _torch_optimizer(optimizer)
    raise _refused("optim", type(optimizer).__name__, "use optim=megatron_dta, optim=megatron or optim=fsdp")


def _megatron_optimizer(optimizer: McoreOptimizerConfig) -> dict[str, Any]:
    if optimizer.optimizer != "adam":
        raise _refused("optim.optimizer", optimizer.optimizer, "use adam")
    if optimizer.weight_decay_incr_style != "constant":
        raise _refused("optim.weight_decay_incr_style", optimizer.weight_decay_incr_style, "use constant")
    if optimizer.lr_warmup_init:
        raise _refused("optim.lr_warmup_init", optimizer.lr_warmup_init, "the warm-up starts at 0; leave it out")
    if optimizer.use_checkpoint_opt_param_scheduler:
        raise _refused("optim.use_checkpoint_opt_param_scheduler", True, "the settings decide; set it to False")
    style = {"inverse_square_root": "inverse-square-root"}.get(optimizer.lr_decay_style, optimizer.lr_decay_style)
    named = {
        "min_lr": optimizer.min_lr,
        "lr_decay_style": style,
        "lr_decay_iters": optimizer.lr_decay_steps,
        "use_precision_aware_optimizer": optimizer.use_precision_aware_optimizer,
        "main_grads_dtype": optimizer.main_grads_dtype,
        "exp_avg_dtype": optimizer.exp_avg_dtype,
        "exp_avg_sq_dtype": optimizer.exp_avg_sq_dtype,
    }
    # Settings that exist here under the same name, such as adam_eps and optimizer_cpu_offload.
    return named | dict(optimizer.override_optimizer_config or {})


def _torch_optimizer(optimizer: FSDPOptimizerConfig) -> dict[str, Any]:
    if (optimizer.optimizer, optimizer.optimizer_impl) != ("AdamW", "torch.optim"):
        raise _refused("optim.optimizer", f"{optimizer.optimizer_impl}.{optimizer.optimizer}", "use torch.optim.AdamW")
    if optimizer.num_cycles != 0.5:
        raise _refused("optim.num_cycles", optimizer.num_cycles, "the cosine decays once; use 0.5")
    if optimizer.override_optimizer_config:
        raise _refused("optim.override_optimizer_config", optimizer.override_optimizer_config, "use optim=megatron_dta")
    return {"lr_decay_style": optimizer.lr_scheduler_type, "min_lr": (optimizer.min_lr_ratio or 0.0) * optimizer.lr}


def _local_folder(model: HFModelConfig) -> str:
    """The folder of the model's checkpoint; a name on the Hugging Face hub is downloaded or found in the cache."""
    if Path(model.local_path).is_dir():
        return model.local_path
    from huggingface_hub import snapshot_download

    return snapshot_download(model.path, allow_patterns=list(_HF_FILES))


def _refused(name: str, value: object, fix: str) -> InputError:
    return InputError(f"{name}={value} is not supported by the engine megatron_dta: {fix}")
