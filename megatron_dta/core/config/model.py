"""The model's shape, in Megatron's terms; ``core.model`` turns it into a Megatron ``TransformerConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatron_dta.core.config.options import CONFIG_JSON, NO_FLAG, REQUIRED, option
from megatron_dta.core.families import mixer_of
from megatron_dta.core.shapes.mixer import Mixer
from megatron_dta.core.shapes.moe_layers import parse_mixer_layer_freq, parse_moe_layer_freq

# Megatron's linear layers that can have a LoRA adapter, of attention and of the feed-forward part.
LORA_TARGETS = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")


shape_option = partial(option, flag=CONFIG_JSON)
moe_option = partial(option, needs="num_experts")


@dataclass
class ModelConfig:
    """A decoder-only transformer. Settings that are left None are derived from the others."""

    num_layers: int = option(REQUIRED, "Number of transformer layers.", minimum=1)
    hidden_size: int = option(REQUIRED, "Width of the hidden states.", minimum=1)
    num_attention_heads: int = option(REQUIRED, "Number of query heads.", minimum=1)
    ffn_hidden_size: int | None = option(
        None,
        "Width of the feed-forward layer (default: 4 x hidden size; with --swiglu two thirds of that, rounded down to"
        " a multiple of 64).",
        minimum=1,
    )
    num_query_groups: int | None = option(
        None, "Number of key and value heads (default: --num-attention-heads).", minimum=1
    )
    kv_channels: int | None = option(None, "Size of one attention head (default: hidden size / heads).", minimum=1)
    max_position_embeddings: int = option(4096, "Longest sequence for which rotary positions are prepared.", minimum=1)
    vocab_size: int | None = option(
        None, "Token ids are 0 to vocab size - 1 (default: the tokenizer's size).", minimum=1
    )
    make_vocab_size_divisible_by: int = option(
        1, "Pad the embedding to a multiple of this size; padded ids never occur.", minimum=1
    )
    normalization: str = shape_option("RMSNorm", "Kind of normalization.", choices=("RMSNorm", "LayerNorm"))
    norm_epsilon: float = option(1e-5, "Epsilon of the normalization.", above=0)
    swiglu: bool = option(False, "Use gated linear units with SiLU in the feed-forward layer instead of GELU.")
    squared_relu: bool = shape_option(False, "Square of ReLU instead of GELU in the feed-forward layer.")
    position_embedding_type: str = shape_option("rope", "Position embedding.", choices=("rope", "yarn", "none"))
    rotary_base: float = option(10000.0, "Base of the rotary frequencies.", above=1)
    rotary_percent: float = shape_option(
        1.0, "Fraction of each head that is rotated, above 0 and at most 1.", above=0, maximum=1
    )
    rotary_seq_len_interpolation_factor: float | None = shape_option(
        None, "Linear scaling of rotary positions: positions are divided by this factor.", above=0
    )
    use_rope_scaling: bool = option(False, "Scale rotary frequencies as Llama 3 does.")
    rope_scaling_factor: float = shape_option(
        8.0, "Llama 3 scaling: low frequencies are divided by this factor.", above=0
    )
    rope_scaling_low_freq_factor: float = shape_option(
        1.0, "Llama 3 scaling: frequencies with fewer than this many turns over the original length are low.", above=0
    )
    rope_scaling_high_freq_factor: float = shape_option(
        4.0,
        "Llama 3 scaling: frequencies with more than this many turns over the original length are unchanged.",
        above=0,
    )
    rope_scaling_original_max_position_embeddings: int = shape_option(
        8192, "Llama 3 scaling: maximum length of the model before scaling.", minimum=1
    )
    rotary_scaling_factor: float = shape_option(1.0, "YaRN: low frequencies are divided by this factor.", above=0)
    yarn_original_max_position_embeddings: int = shape_option(
        4096, "YaRN: maximum length of the model before scaling.", minimum=1
    )
    yarn_beta_fast: float = shape_option(
        32.0, "YaRN: frequencies with more than this many turns over the original length are unchanged.", above=0
    )
    yarn_beta_slow: float = shape_option(
        1.0,
        "YaRN: frequencies with fewer than this many turns over the original length are divided by the scaling factor.",
        above=0,
    )
    no_yarn_correction_range_round_to_int: bool = shape_option(
        False, "YaRN: do not round the bounds of the range between scaled and unchanged frequencies."
    )
    mscale: float = shape_option(
        1.0, "YaRN: how strongly cosine and sine grow with the logarithm of the scaling factor."
    )
    mscale_all_dim: float = shape_option(0.0, "YaRN: the same coefficient, in the denominator.")
    qk_layernorm: bool = option(False, "Normalize queries and keys per head.")
    add_qkv_bias: bool = option(False, "Add a bias to the query, key and value projection only.")
    disable_bias_linear: bool = option(False, "Omit the bias of the linear layers.")
    untie_embeddings_and_output_weights: bool = option(False, "Use an output matrix separate from the embedding.")
    attention_output_gate: bool = shape_option(
        False, "Multiply the output of attention by a learned gate for each channel."
    )
    apply_layernorm_1p: bool = shape_option(
        False, "Store the weights of norms as deviations from 1 (all but those inside a mixer)."
    )
    mixer: Mixer | None = option(
        None,
        "Kind and sizes of the layers that mix tokens otherwise than plain attention does (core.families).",
        flag=CONFIG_JSON,
    )
    mixer_layer_freq: str | None = shape_option(
        None,
        "Layers with this mixer: N for attention in every N-th layer and the mixer in the others, or a list with one "
        "entry per layer, such as ([1]*3+[0])*2 (1 for the mixer); default: all.",
    )
    hybrid_layer_pattern: str | None = shape_option(
        None,
        "Layers with one part each, a letter for each layer: M (the mixer), * (attention), - (feed-forward) or E "
        "(experts), such as MEM*E; default: layers with attention or the mixer, and a feed-forward part.",
    )
    recurrence_impl: str = option(
        "auto",
        "Implementation of a mixer's recurrence: the kernels of flash-linear-attention (extra hybrid; a GPU, 16 bits), "
        "plain PyTorch (reference), or the kernels on a GPU in 16 bits and plain PyTorch elsewhere (auto).",
        choices=("auto", "fla", "reference"),
        flag=NO_FLAG,
    )
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.", minimum=0)
    bf16: bool = option(
        False, "Keep weights and activations in bfloat16; master weights and gradients stay in float32."
    )
    params_dtype: torch.dtype | None = option(
        None, "Dtype of the weights, derived from --bf16; torch.float64 for exactness tests.", flag=NO_FLAG
    )
    transformer_impl: str = option(
        "local",
        "Implementation of the linear layers: Megatron's own, or Transformer Engine's if it is installed.",
        choices=("local", "transformer_engine"),
    )
    fused_layer_impl: str = option(
        "auto",
        "Implementation of norms, QK norm with rotary positions, and SwiGLU. triton: one kernel each, whose outputs "
        "are recomputed in the backward; reference: Megatron's modules; auto: triton on a CUDA GPU, except for "
        "float64.",
        choices=("auto", "triton", "reference"),
        flag=NO_FLAG,
    )
    enable_fp32_lm_head: bool = option(
        False,
        "Keep logits in float32, in training and in the in-process sampler, instead of rounding them to the dtype of "
        "the model. That brings their logprobs closer together; SGLang has the same flag for its side.",
        flag=NO_FLAG,
    )
    batch_invariant_mode: bool = option(
        False,
        "Give a token the same logprob, bit for bit, whatever else a pass computes: other requests, parts of prompts, "
        "drafts, segments. The in-process sampler's logprobs then equal the trainer's; a run ends with an error if one "
        "does not.",
    )
    fp8_format: str | None = option(
        None,
        "FP8 format of the layers' matrix products; needs --transformer-impl transformer_engine.",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str | None = option(
        None,
        "Scaling of FP8 values: per 128 values of a row (blockwise, the default), per tensor (tensorwise), or per 32 "
        "values (mxfp8, on Blackwell or newer).",
        choices=("tensorwise", "mxfp8", "blockwise"),
        needs="fp8_format",
    )
    recompute_granularity: str | None = option(
        None,
        "Recompute activations inside a segment's backward: each layer (full), or its attention (selective).",
        choices=("full", "selective"),
    )

    # Expert indices are stored in 16 bits, in rollouts and between a forward and its recomputation.
    num_experts: int | None = option(
        None, "Routed experts per mixture-of-experts layer (default: no such layers).", minimum=1, maximum=1 << 15
    )
    moe_router_topk: int = moe_option(2, "Experts to which each token is routed.", minimum=1)
    moe_ffn_hidden_size: int | None = moe_option(
        None, "Width of one expert's feed-forward layer (default: --ffn-hidden-size).", minimum=1
    )
    moe_layer_freq: str = moe_option(
        "1",
        "Layers with experts: N for every N-th layer starting with the first, or a list with one entry per layer, "
        "such as [0]*1+[1]*3.",
    )
    moe_shared_expert_intermediate_size: int | None = moe_option(
        None, "Total width of the shared experts, which process every token (default: no shared experts).", minimum=1
    )
    moe_shared_expert_gate: bool = shape_option(False, "Scale the shared experts' output by a learned gate.")
    moe_router_score_function: str = moe_option(
        "softmax", "Function that turns router logits into scores.", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = shape_option(
        False, "Apply the softmax over all experts before the top k are chosen instead of after."
    )
    moe_router_topk_scaling_factor: float | None = shape_option(
        None, "Factor applied to the scores of the chosen experts.", above=0
    )
    moe_router_num_groups: int | None = shape_option(
        None, "Number of expert groups, of which moe_router_group_topk are chosen first.", minimum=1
    )
    moe_router_group_topk: int | None = shape_option(None, "Groups to which a token may be routed.", minimum=1)
    moe_router_enable_expert_bias: bool = moe_option(
        False,
        "Balance the load by a bias on each expert's score, updated from its load after every step; needs "
        "--moe-router-score-function sigmoid.",
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "Change of an expert's bias per step.", minimum=0, needs="moe_router_enable_expert_bias"
    )
    moe_aux_loss_coeff: float = moe_option(0.0, "Coefficient of the load-balancing loss; 0 disables it.", minimum=0)
    moe_z_loss_coeff: float | None = moe_option(
        None, "Coefficient of the mean squared log-sum-exp of the router's logits (default: no such loss).", minimum=0
    )
    moe_routing_replay: str | None = moe_option(
        None,
        "Route tokens to the experts that the rollouts' sampler chose (field routed_experts). Where rollouts that "
        "share a token were routed differently, the choice of the first rollout holds for all (first), or the token is "
        "shared only among rollouts that were routed the same way (fork).",
        choices=("first", "fork"),
    )
    moe_grouped_gemm: bool = option(
        True, "Compute the experts of a rank as grouped matrix products instead of one by one.", flag=NO_FLAG
    )

    lora_rank: int | None = option(
        None,
        "Train low-rank adapters of this rank and freeze the other weights (default: train all weights).",
        minimum=1,
    )
    lora_alpha: float | None = option(
        None,
        "The output of an adapter is scaled by --lora-alpha / --lora-rank (default: --lora-rank).",
        above=0,
        needs="lora_rank",
    )
    lora_target_modules: list[str] | None = option(
        None,
        "Linear layers with adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2; in_proj and out_proj of layers "
        "with a recurrence; of latent attention linear_q_proj or linear_q_down_proj and linear_q_up_proj, "
        "linear_kv_down_proj, linear_kv_up_proj and linear_proj (default: all).",
        needs="lora_rank",
    )

    def __post_init__(self) -> None:
        """Derive the settings that were left None, as Megatron's argument validation does."""
        if self.ffn_hidden_size is None:
            # Two thirds keep the parameter count of the gated layer's three matrices near that of two.
            gated = max(64, int((4 * self.hidden_size * 2 / 3) / 64) * 64)
            self.ffn_hidden_size = gated if self.swiglu else 4 * self.hidden_size
        if (
            self.kv_channels is None
            and self.num_attention_heads > 0
            and self.hidden_size % self.num_attention_heads == 0
        ):
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.params_dtype is None:
            self.params_dtype = torch.bfloat16 if self.bf16 else torch.float32

        if self.num_experts is not None and self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        self.moe_layer_freq = str(self.moe_layer_freq)
        if isinstance(self.mixer, Mapping):  # as a checkpoint stores it
            self.mixer = mixer_of(self.mixer)
        if self.mixer_layer_freq is not None:
            self.mixer_layer_freq = str(self.mixer_layer_freq)
        if self.lora_rank is not None:
            self.lora_alpha = float(self.lora_rank if self.lora_alpha is None else self.lora_alpha)
            self.lora_target_modules = list(self.lora_target_modules or self.lora_targets)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the linear layers that can have adapters."""
        attention, feed_forward = LORA_TARGETS
        of_mixer = self.mixer.projections(self.hidden_size) if any(self.mixer_layers) else ()
        return tuple(dict.fromkeys((*(() if all(self.mixer_layers) else attention), *of_mixer, *feed_forward)))

    @property
    def rotated_channels(self) -> int:
        """Channels of a head that rotary positions rotate."""
        of_mixer = None if self.mixer is None else self.mixer.rotated_channels
        return of_mixer or int(self.kv_channels * self.rotary_percent)

    @property
    def moe_layers(self) -> list[bool]:
        """For each layer, whether it has experts according to ``num_experts`` and ``moe_layer_freq``."""
        if self.hybrid_layer_pattern is not None:
            return [letter == "E" for letter in self.hybrid_layer_pattern]
        if self.num_experts is None:
            return [False] * self.num_layers
        return parse_moe_layer_freq(self.moe_layer_freq, self.num_layers)

    @property
    def mixer_layers(self) -> list[bool]:
        """For each layer, whether it has ``mixer`` instead of attention."""
        if self.hybrid_layer_pattern is not None:
            return [letter == "M" for letter in self.hybrid_layer_pattern]
        if self.mixer is None or self.mixer_layer_freq is None:
            return [self.mixer is not None] * self.num_layers
        return parse_mixer_layer_freq(self.mixer_layer_freq, self.num_layers)

    def padded_vocab_size(self, tensor_size: int = 1) -> int:
        """Rows of the embedding, divisible by ``tensor_size`` tensor-parallel ranks (Megatron's rule)."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not known yet: it comes from --vocab-size or from the tokenizer")
        unit = self.make_vocab_size_divisible_by * tensor_size
        return -(-self.vocab_size // unit) * unit


def without_lora(model: ModelConfig) -> ModelConfig:
    """The same model without adapters."""
    return replace(model, lora_rank=None, lora_alpha=None, lora_target_modules=None)
