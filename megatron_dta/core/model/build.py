"""Builds the model: our settings -> Megatron's ``TransformerConfig`` and layer spec -> ``TreeGPTModel``.

This file holds everything that depends on how Megatron-Core constructs a model, and on its versions (0.16.1 to 0.19).
Support for another of Megatron's model classes needs changes here only. Experts, other mixers than attention,
adapters, critics and Transformer Engine are imported where a model has them, so that a dense model loads none of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from dta_kernels.invariant.products import set_batch_invariant
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.config.checks.mesh import check_context_parallel, check_tensor_parallel
from megatron_dta.core.config.checks.model import check_batch_invariant, check_rotary
from megatron_dta.core.extensions import TRANSFORMER_ENGINE
from megatron_dta.core.families import part_of
from megatron_dta.core.model.activation import activation_of, steady_silu
from megatron_dta.core.model.attention.core_attention import TreeAttention
from megatron_dta.core.model.kernels import choose_fused_layers
from megatron_dta.core.model.main_grad import use_main_grad, with_main_grad_layers
from megatron_dta.core.model.parallel.mesh import initial_seed
from megatron_dta.core.model.rotary import set_attention_factor, set_frequencies
from megatron_dta.core.model.tree_model import TreeGPTModel

if TYPE_CHECKING:
    from megatron_dta.core.model.parallel.staged_model import Model


def transformer_config(model: ModelConfig, parallel: ParallelConfig | None = None) -> TransformerConfig:
    """Megatron's configuration of ``model``: no dropout, no fusion that changes a result."""
    parallel = parallel or ParallelConfig()
    _check(model, parallel)
    has_cuda = torch.cuda.is_available()
    settings = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=activation_of(model),
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=not model.disable_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        init_method_std=model.init_method_std,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=model.params_dtype,
        pipeline_dtype=model.params_dtype,
        bf16=model.params_dtype == torch.bfloat16,
        # Without this, the stock attention of the parity reference would not stay in float64.
        attention_softmax_in_fp32=model.params_dtype != torch.float64,
        fp8=model.fp8_format,
        recompute_granularity=model.recompute_granularity,
        recompute_method="uniform" if model.recompute_granularity == "full" else None,
        recompute_num_layers=1 if model.recompute_granularity == "full" else None,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **_pipeline_settings(model, parallel),
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        attention_output_gate=model.attention_output_gate,
        layernorm_zero_centered_gamma=model.apply_layernorm_1p,
        **_settings_of_parts(model),
        # Gradients of replicas are summed, not averaged: the loss weights include the step's one denominator.
        calculate_per_token_loss=True,
        use_cpu_initialization=not has_cuda,
        # The fused versions use torch.compile, which takes seconds to start and changes roundings.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # Megatron's fusion needs a CUDA extension of another package; main_grad.py does the same without it.
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
    )
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    config = TransformerConfig(**{name: value for name, value in settings.items() if name in known})
    config.mixer, config.mixer_layers = model.mixer, tuple(model.mixer_layers)
    config.hybrid_layer_pattern = model.hybrid_layer_pattern
    if any(model.mixer_layers) and not all(model.mixer_layers):
        # Megatron stores layers that differ one by one.
        config.linear_attention_freq = [int(has_mixer) for has_mixer in model.mixer_layers]
    # Not before, because Megatron-Core 0.16 refuses it for some models.
    config.context_parallel_size = parallel.context_parallel_size
    # Nor this, which Megatron allows with Transformer Engine only.
    config.batch_invariant_mode = model.batch_invariant_mode
    set_attention_factor(config, model)
    return config


def _check(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse a model that cannot be built."""
    check_rotary(model)
    check_tensor_parallel(model, parallel)
    check_context_parallel(model, parallel)
    if model.transformer_impl != "local" or model.fp8_format is not None:
        from megatron_dta.core.config.checks.transformer_engine import check_fp8, check_transformer_impl

        check_transformer_impl(model)
        check_fp8(model, parallel)
    if model.num_experts is not None:
        from megatron_dta.core.config.checks.experts import check_experts

        check_experts(model, parallel)
    if model.apply_layernorm_1p or model.attention_output_gate or model.mixer or model.hybrid_layer_pattern:
        from megatron_dta.core.config.checks.hybrid import check_hybrid

        check_hybrid(model, parallel)
    check_batch_invariant(model, parallel)
    if model.lora_rank is not None:
        from megatron_dta.core.config.checks.lora import check_lora

        check_lora(model, parallel)


def _settings_of_parts(model: ModelConfig) -> dict[str, object]:
    """The settings of Megatron's ``TransformerConfig`` for FP8 and experts."""
    settings: dict[str, object] = {}
    if model.fp8_format is not None:
        from megatron_dta.core.config.checks.transformer_engine import DEFAULT_FP8_RECIPE

        settings["fp8_recipe"] = model.fp8_recipe or DEFAULT_FP8_RECIPE
    if model.num_experts is not None:
        from megatron_dta.core.model.experts.spec import expert_settings

        settings |= expert_settings(model)
    return settings


def _stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Number of layers of each virtual stage."""
    if parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank == 1:
        return [model.num_layers]
    from megatron_dta.core.config.derived.pipeline_layout import stage_layers

    return stage_layers(model, parallel)


def _pipeline_settings(model: ModelConfig, parallel: ParallelConfig) -> dict[str, object]:
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    if size == 1:
        return {}
    layout: list[list[str]] = [["decoder"] * layers for layers in _stage_layers(model, parallel)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return dict(
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=layout,
        # Every message is a separate send or receive; the engine controls what they wait for.
        batch_p2p_comm=False,
        batch_p2p_sync=False,
        overlap_p2p_comm=chunks > 1,
    )


def layer_spec(model: ModelConfig, layer: int = 0, is_stock: bool = False, router: type | None = None) -> ModuleSpec:
    """Megatron's spec of layer ``layer`` (from 0), with our core attention, router and mixer.

    Args:
        is_stock: with the stock attention, ``router`` (None for the stock router) and the mixer's reference instead.
    """
    if model.moe_layers[layer]:
        from megatron_dta.core.model.experts.router import TreeRouter
        from megatron_dta.core.model.experts.spec import expert_layer_spec

        spec = expert_layer_spec(model, router if is_stock else TreeRouter)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=model.qk_layernorm, normalization=model.normalization)
    if not is_stock:
        spec.submodules.self_attention.submodules.core_attention = TreeAttention
    if model.attention_output_gate:
        from megatron_dta.core.model.hybrid.gated_attention import GatedSelfAttention

        spec.submodules.self_attention.module = GatedSelfAttention
    if model.apply_layernorm_1p:
        set_norms(spec, _norm(model, ParallelConfig()), model.qk_layernorm)
    if model.mixer_layers[layer]:
        spec.submodules.self_attention = part_of(model.mixer.kind, "layer").spec()
        if is_stock:
            spec.submodules.self_attention.module = part_of(model.mixer.kind, "reference").Plain
    return spec


def _norm(model: ModelConfig, parallel: ParallelConfig) -> type:
    """The class of the norms."""
    if model.apply_layernorm_1p:
        from megatron_dta.core.model.hybrid.gated_attention import ZeroCenteredRMSNorm

        return ZeroCenteredRMSNorm
    if parallel.sequence_parallel:
        from megatron_dta.core.model.layers.sequence_parallel import SequenceParallelNorm

        return SequenceParallelNorm
    return WrappedTorchNorm


def block_spec(
    model: ModelConfig, parallel: ParallelConfig, layers: range, fused: bool = False
) -> TransformerBlockSubmodules:
    """The spec of the given ``layers`` and of the final norm.

    With ``fused`` the layers are those of ``fused_layer``.
    """
    norm = _norm(model, parallel)
    specs = [layer_spec(model, layer) for layer in layers]
    if parallel.sequence_parallel and not model.apply_layernorm_1p:
        for layer in specs:
            set_norms(layer, norm, model.qk_layernorm)
    # From a layer spec alone, Megatron would use Transformer Engine's final norm if that package is installed.
    spec = TransformerBlockSubmodules(specs, layer_norm=norm)
    if model.transformer_impl == "transformer_engine":
        from megatron_dta.core.config.checks.transformer_engine import check_fp8_support

        check_fp8_support(model)
        TRANSFORMER_ENGINE.part.use_layers(spec, not parallel.no_gradient_accumulation_fusion, rereads_input=fused)
    if fused:
        # The reference does not need Triton.
        from megatron_dta.core.model.layers.fused_layer import fuse_layers

        fuse_layers(spec, model)
    if not parallel.no_gradient_accumulation_fusion:
        with_main_grad_layers(spec)
    _keep_parts(model, dict(zip(layers, spec.layer_specs, strict=True)))
    return spec


def _keep_parts(model: ModelConfig, specs: dict[int, ModuleSpec]) -> None:
    """Leave the layers of ``hybrid_layer_pattern`` one part."""
    if model.hybrid_layer_pattern is not None:
        from megatron_dta.core.model.hybrid.single_part import keep_one_part

        for layer, spec in specs.items():
            keep_one_part(spec, model.hybrid_layer_pattern[layer])


def set_norms(spec: ModuleSpec, norm: type, of_heads: bool) -> None:
    """Put ``norm`` into a layer's spec, and with ``of_heads`` also for queries and keys."""
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    attention = spec.submodules.self_attention.submodules
    if of_heads and hasattr(attention, "q_layernorm"):
        attention.q_layernorm = attention.k_layernorm = norm


def model_arguments(model: ModelConfig, tensor_size: int = 1) -> dict[str, object]:
    """Arguments of ``GPTModel`` besides its configuration and spec."""
    return dict(
        vocab_size=model.padded_vocab_size(tensor_size),
        max_sequence_length=model.max_position_embeddings,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        # Megatron's plain rotary embedding for every kind of scaling; set_frequencies sets the scaled frequencies.
        position_embedding_type="rope",
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
    )


def build_model(
    model: ModelConfig, device: torch.device, parallel: ParallelConfig | None = None, value_head: bool = False
) -> Model:
    """This rank's part of a freshly initialized model on ``device``, in ``model.params_dtype``.

    The random state decides the weights. ``initialize_parallel`` must have run with the same sizes.

    Args:
        value_head: build a critic, see ``value_model``.

    Raises:
        InputError: the model cannot be divided among this number of ranks.
    """
    parallel = parallel or ParallelConfig()
    num_stages, num_model_chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    layers = _stage_layers(model, parallel)
    config = transformer_config(model, parallel)
    fused = choose_fused_layers(model.fused_layer_impl, model.params_dtype, device)
    if model.batch_invariant_mode:
        set_batch_invariant(True)
        if not fused:
            config.activation_func = steady_silu
    chunk_class, arguments = TreeGPTModel, model_arguments(model, parallel.tensor_model_parallel_size)
    if value_head:
        from megatron_dta.core.model.value_model import TreeValueModel

        chunk_class, arguments = TreeValueModel, arguments | {"share_embeddings_and_output_weights": False}
    model_chunks = []
    for number in range(num_model_chunks):
        virtual_stage = number * num_stages + parallel_state.get_pipeline_model_parallel_rank()
        first_layer = sum(layers[:virtual_stage])
        chunk = chunk_class(
            config,
            block_spec(model, parallel, range(first_layer, first_layer + layers[virtual_stage]), fused),
            **arguments,
            pre_process=virtual_stage == 0,
            post_process=virtual_stage == len(layers) - 1,
            vp_stage=number if num_model_chunks > 1 else None,
        )
        set_frequencies(chunk, model)
        chunk.has_fused_layers = fused
        chunk.true_vocab_size, chunk.fp32_lm_head = model.vocab_size, model.enable_fp32_lm_head
        chunk.stage_layers = tuple(layers)
        model_chunks.append(chunk.to(device=device, dtype=model.params_dtype))
        if not parallel.no_gradient_accumulation_fusion:
            use_main_grad(chunk)
        _finish_parts(chunk, model, device)
        if model.lora_rank is not None:
            from megatron_dta.core.model.layers.lora import add_adapters

            add_adapters(chunk, model, initial_seed())
    if num_stages == 1:
        return model_chunks[0]
    from megatron_dta.core.model.parallel.staged_model import StagedModel

    return StagedModel(model_chunks)


def _finish_parts(chunk: TreeGPTModel, model: ModelConfig, device: torch.device) -> None:
    """What experts and another mixer need once a chunk is on its device, in its dtype."""
    if model.num_experts is not None:
        from megatron_dta.core.model.experts.router import keep_balance_in_float32

        keep_balance_in_float32(chunk)
    if model.mixer is not None:
        part_of(model.mixer.kind, "layer").use_kernels(chunk, model, device)


def build_stock_model(model: ModelConfig, device: torch.device, router: type | None = None) -> GPTModel:
    """Megatron's own ``GPTModel`` with its own attention: the reference that tree training must agree with.

    Its parameters have the same names as those of ``build_model``, so both can load the same state dictionary. Another
    mixer than attention is its family's reference.

    Args:
        router: replaces Megatron's router, which computes in float32 for every model dtype.
    """
    specs = [layer_spec(model, layer, True, router) for layer in range(model.num_layers)]
    _keep_parts(model, dict(enumerate(specs)))
    spec = TransformerBlockSubmodules(specs, _norm(model, ParallelConfig()))
    stock = GPTModel(transformer_config(model), spec, **model_arguments(model))
    set_frequencies(stock, model)
    return stock.to(device=device, dtype=model.params_dtype)
