"""The model's shape, in Megatron's terms; ``megatron_dta.model`` turns it into a Megatron ``TransformerConfig``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_dta.config.derived.moe_layers import parse_moe_layer_freq
from megatron_dta.config.options import REQUIRED, option

# Megatron's linear layers that can have a LoRA adapter.
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class ModelConfig:
    """A decoder-only transformer. What is left None is derived from the rest when the object is made."""

    num_layers: int = option(REQUIRED, "Number of transformer layers.", minimum=1)
    hidden_size: int = option(REQUIRED, "Width of the hidden states.", minimum=1)
    num_attention_heads: int = option(REQUIRED, "Number of query heads.", minimum=1)
    ffn_hidden_size: int | None = option(
        None,
        "Width of the feed-forward layer (default: 4 x hidden size, with --swiglu two thirds of that in 64s).",
        minimum=1,
    )
    group_query_attention: bool = option(False, "Share each key and value head between several query heads.")
    num_query_groups: int | None = option(
        None, "Number of key and value heads; needs --group-query-attention.", minimum=1
    )
    kv_channels: int | None = option(None, "Size of one attention head (default: hidden size / heads).", minimum=1)
    max_position_embeddings: int = option(4096, "Longest sequence the rotary positions are prepared for.", minimum=1)
    vocab_size: int | None = option(
        None, "Token ids are 0 to vocab size - 1 (default: the tokenizer's size).", minimum=1
    )
    make_vocab_size_divisible_by: int = option(
        1, "Pad the embedding to a multiple of this; padded ids never occur.", minimum=1
    )
    normalization: str = option("RMSNorm", "Kind of normalization.", choices=("RMSNorm", "LayerNorm"))
    norm_epsilon: float = option(1e-5, "Epsilon of the normalization.", above=0)
    swiglu: bool = option(False, "Gated linear units with SiLU in the feed-forward layer, instead of GELU.")
    position_embedding_type: str = option("rope", "Position embedding.", choices=("rope", "yarn"))
    rotary_base: float = option(10000.0, "Base of the rotary frequencies.", above=1)
    rotary_percent: float = option(1.0, "Part of each head that is rotated, above 0 and at most 1.", above=0, maximum=1)
    rotary_seq_len_interpolation_factor: float | None = option(
        None, "Positions are divided by this (linear scaling of rotary positions).", above=0
    )
    use_rope_scaling: bool = option(False, "Llama 3's scaling of rotary frequencies.")
    rope_scaling_factor: float = option(8.0, "Llama 3's scaling: low frequencies are divided by this.", above=0)
    rope_scaling_low_freq_factor: float = option(
        1.0, "Llama 3's scaling: frequencies of less than so many turns over the original length are low.", above=0
    )
    rope_scaling_high_freq_factor: float = option(
        4.0, "Llama 3's scaling: frequencies of more than so many turns over the original length are kept.", above=0
    )
    rope_scaling_original_max_position_embeddings: int = option(
        8192, "Llama 3's scaling: length of the model before it.", minimum=1
    )
    rotary_scaling_factor: float = option(1.0, "YaRN: low frequencies are divided by this.", above=0)
    yarn_original_max_position_embeddings: int = option(4096, "YaRN: length of the model before it.", minimum=1)
    yarn_beta_fast: float = option(32.0, "YaRN: frequencies of more turns over that length are kept.", above=0)
    yarn_beta_slow: float = option(1.0, "YaRN: frequencies of fewer turns over that length are divided.", above=0)
    no_yarn_correction_range_round_to_int: bool = option(
        False, "YaRN: do not round the two ends of the range of frequencies between them."
    )
    mscale: float = option(1.0, "YaRN: growth of cosine and sine with the logarithm of the scaling factor.")
    mscale_all_dim: float = option(0.0, "YaRN: the same, in the denominator.")
    qk_layernorm: bool = option(False, "Normalize queries and keys per head.")
    add_qkv_bias: bool = option(False, "Bias on the query, key and value projection only.")
    disable_bias_linear: bool = option(False, "No bias on the linear layers.")
    untie_embeddings_and_output_weights: bool = option(False, "An output matrix of its own beside the embedding.")
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.", minimum=0)
    attention_dropout: float = option(0.0, "Dropout on attention; only 0, because shared prefixes draw one mask.")
    hidden_dropout: float = option(0.0, "Dropout on hidden states; only 0, because shared prefixes draw one mask.")
    bf16: bool = option(False, "Weights and activations in bfloat16; master weights and gradients stay in float32.")
    fp16: bool = option(False, "Refused: float16 needs loss scaling; use --bf16.")
    params_dtype: torch.dtype | None = option(
        None, "Weights' dtype, derived from --bf16; torch.float64 for exactness tests.", command_line=False
    )
    transformer_impl: str = option(
        "local",
        "Linear layers: Megatron's own, or Transformer Engine's where that is installed.",
        choices=("local", "transformer_engine"),
    )
    fused_layer_impl: str = option(
        "auto",
        "Norms, QK-norm with rotary positions, SwiGLU: triton: one kernel each, and what they write is computed again "
        "in the backward; reference: Megatron's modules; auto: triton on a CUDA GPU but for float64.",
        choices=("auto", "triton", "reference"),
    )
    fp8_format: str | None = option(
        None,
        "Products of the layers in FP8; needs --transformer-impl transformer_engine.",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str | None = option(
        None,
        "How FP8 values are scaled: per 128 values of a row (blockwise, the default), per tensor (tensorwise), per 32 "
        "values (mxfp8, from Blackwell on), or as in earlier passes (delayed), which is refused.",
        choices=("delayed", "tensorwise", "mxfp8", "blockwise"),
    )
    recompute_granularity: str | None = option(
        None, "Recompute activations inside a segment's backward.", choices=("full", "selective")
    )
    recompute_method: str | None = option(
        None, "Which layers --recompute-granularity full recomputes.", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = option(
        None, "Layers per recomputed unit (uniform) or recomputed (block).", minimum=1
    )

    # Their numbers are kept in 16 bits, in rollouts and between a forward and its recomputation.
    num_experts: int | None = option(
        None, "Routed experts of a mixture-of-experts layer (default: no such layers).", minimum=1, maximum=1 << 15
    )
    moe_router_topk: int = option(2, "Experts that each token is routed to.", minimum=1)
    moe_ffn_hidden_size: int | None = option(
        None, "Width of one expert's feed-forward layer (default: --ffn-hidden-size).", minimum=1
    )
    moe_layer_freq: str = option(
        "1", "Which layers have experts: every N-th from the first, or a list like [0]*1+[1]*3, one entry a layer."
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, "Width of the shared experts together, which every token goes through (default: none).", minimum=1
    )
    moe_shared_expert_gate: bool = option(False, "Scale the shared experts' output by a learned gate.")
    moe_router_score_function: str = option("softmax", "Router scores from logits.", choices=("softmax", "sigmoid"))
    moe_router_pre_softmax: bool = option(False, "Softmax over all experts before the top k are chosen, not after.")
    moe_router_topk_scaling_factor: float | None = option(None, "Factor on the chosen experts' scores.", above=0)
    moe_router_num_groups: int | None = option(
        None, "Groups of experts, of which --moe-router-group-topk are chosen first.", minimum=1
    )
    moe_router_group_topk: int | None = option(None, "Groups that a token may be routed to.", minimum=1)
    moe_router_dtype: str | None = option(
        None, "Dtype of the router's logits (default: that of the activations).", choices=("fp32", "fp64")
    )
    moe_router_enable_expert_bias: bool = option(
        False, "Balance by a bias on each expert's score, set after every step from its load; needs sigmoid scores."
    )
    moe_router_bias_update_rate: float = option(1e-3, "What an expert's bias changes by in a step.", minimum=0)
    moe_router_load_balancing_type: str = option(
        "seq_aux_loss",
        "Kind of balancing loss: of each sequence alone, averaged over a step's sequences.",
        choices=("seq_aux_loss", "none", "aux_loss", "global_aux_loss", "sinkhorn"),
    )
    moe_aux_loss_coeff: float = option(0.0, "Factor of the balancing loss; 0 for none.", minimum=0)
    moe_z_loss_coeff: float | None = option(
        None, "Factor of the mean squared log-sum-exp of the router's logits (default: none).", minimum=0
    )
    moe_routing_replay: bool = option(
        False, "Route tokens to the experts that the rollouts' sampler chose (their field routed_experts)."
    )
    moe_grouped_gemm: bool = option(
        False, "Run a rank's experts as grouped products; weights and checkpoints stay the same."
    )
    moe_token_dispatcher_type: str = option(
        "alltoall", "How tokens reach their experts.", choices=("alltoall", "allgather", "flex")
    )
    moe_expert_capacity_factor: float | None = option(None, "Refused: no token is dropped.")
    moe_pad_expert_input_to_capacity: bool = option(False, "Refused: no token is dropped.")
    moe_token_drop_policy: str | None = option(None, "Refused: no token is dropped.")
    moe_input_jitter_eps: float | None = option(None, "Refused: sequences that share a prefix would share the noise.")

    lora_rank: int | None = option(
        None, "Train low-rank adapters of this rank beside frozen weights (default: train all weights).", minimum=1
    )
    lora_alpha: float | None = option(
        None, "An adapter's output is scaled by this over --lora-rank (default: the rank).", above=0
    )
    lora_dropout: float = option(0.0, "Dropout before adapters; only 0, because shared prefixes draw one mask.")
    lora_target_modules: list[str] | None = option(
        None, "Linear layers with adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2 (default: all four)."
    )

    def __post_init__(self) -> None:
        """Derive what was left None the way Megatron's argument validation does."""
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
        if self.num_query_groups is None and not self.group_query_attention:
            self.num_query_groups = self.num_attention_heads
        if self.params_dtype is None:
            self.params_dtype = torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

        if self.num_experts is not None and self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        self.moe_layer_freq = str(self.moe_layer_freq)
        if self.lora_rank is not None:
            self.lora_alpha = float(self.lora_rank if self.lora_alpha is None else self.lora_alpha)
            self.lora_target_modules = list(self.lora_target_modules or LORA_TARGETS)

    @property
    def moe_layers(self) -> list[bool]:
        """Whether each layer has experts, as ``num_experts`` and ``moe_layer_freq`` say."""
        if self.num_experts is None:
            return [False] * self.num_layers
        return parse_moe_layer_freq(self.moe_layer_freq, self.num_layers)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary rounded up to ``make_vocab_size_divisible_by``."""
        return self.padded_vocab_size_on(1)

    def padded_vocab_size_on(self, tensor_size: int) -> int:
        """Rows of the embedding on ``tensor_size`` tensor-parallel ranks, an equal number each (Megatron's rule)."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not known yet: it comes from --vocab-size or from the tokenizer")
        unit = self.make_vocab_size_divisible_by * tensor_size
        return -(-self.vocab_size // unit) * unit


def without_lora(model: ModelConfig) -> ModelConfig:
    """The same model without adapters."""
    return replace(model, lora_rank=None, lora_alpha=None, lora_target_modules=None)
