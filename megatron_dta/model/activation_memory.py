"""How many bytes autograd keeps for a token between its forward and its backward, in a model with fused layers.

What a layer keeps for its backward is listed in ``fused_layer``. K and V and their gradients are not among it: they are
the pool's (``kv_pool``).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config import ModelConfig, ParallelConfig

# Statistics are float32: a norm's reciprocal root mean square of a row, a head's log-sum-exp.
_STATISTIC_BYTES = 4


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that a dense layer keeps of one token on one rank, by what they are.

    Attributes:
        streams: the layer's input and the stream between attention and feed-forward, and their norms' statistics.
        attention: the mixed QKV rows, the output and its statistics.
        feed_forward: the first product of the feed-forward layer.
    """

    streams: float
    attention: float
    feed_forward: float

    @property
    def total(self) -> float:
        return self.streams + self.attention + self.feed_forward


def layer_activations(model: ModelConfig, parallel: ParallelConfig | None = None) -> LayerActivations:
    """Bytes that a layer of ``model`` keeps of a token on a rank of the mesh ``parallel``.

    Raises:
        ValueError: for experts, LayerNorm or without SwiGLU, where Megatron's modules decide what is kept.
    """
    if model.num_experts is not None or model.normalization != "RMSNorm" or not model.swiglu:
        raise ValueError("only layers without experts, with RMSNorm and SwiGLU keep what can be told beforehand")
    parallel = parallel or ParallelConfig()
    size = model.params_dtype.itemsize
    ranks = parallel.tensor_model_parallel_size
    rows = ranks if parallel.sequence_parallel else 1
    heads, groups = model.num_attention_heads / ranks, model.num_query_groups / ranks
    mixed, out = (heads + 2 * groups) * model.kv_channels, heads * model.kv_channels
    return LayerActivations(
        streams=2 * (model.hidden_size * size + _STATISTIC_BYTES) / rows,
        attention=(mixed + out) * size + heads * _STATISTIC_BYTES,
        feed_forward=2 * model.ffn_hidden_size / ranks * size,
    )


def activation_bytes_per_token(model: ModelConfig, parallel: ParallelConfig | None = None) -> float:
    """Bytes that the decoder's layers together keep of a token on a rank that has all of them.

    A pipeline stage keeps its share of the layers'. Beside it a pass keeps, once and not for every layer, the final
    norm's input and output and the rotary tables.
    """
    return model.num_layers * layer_activations(model, parallel).total
