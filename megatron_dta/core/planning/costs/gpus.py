"""Predicts the seconds of segments on a GPU from the sizes of a model and the GPU's data sheet.

    seconds of a layer's forward = matrix products / GEMM rate + elementwise bytes / memory rate
                                   + sums over the tensor group and exchanges over the context group / link rate
                                   + attention / attention rate

The achieved shares of the data sheet's rates are those of measured segments (Qwen3-1.7B on an H200,
``benchmarks/results/segment_seconds_qwen3-1.7b_h200.json``); they reproduce the fitted seconds within 1%. Other GPUs
are assumed to achieve the same shares. A run corrects both by its own first steps (``costs.correction``).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.core.planning.costs.model import BACKWARD_FLOOR_PER_LAYER, FORWARD_FLOOR_PER_LAYER, CostModel
from megatron_dta.core.shapes.decoder import DecoderShape

# Achieved shares of the peak: products of layers, attention forward and backward, logits forward and backward.
GEMM_SHARE, ATTENTION_SHARES, LOGIT_SHARES = 0.62, (0.626, 0.457), (0.454, 0.346)
# With heads of more than 128 channels, 494 and 289 TFLOP/s of an H200 (``benchmarks/layers/attention.py``).
WIDE_ATTENTION_SHARES = (0.5, 0.292)
# Achieved shares of the memory's and of the link's bandwidth.
MEMORY_SHARE, LINK_SHARE = 0.55, 0.65
# The share for copies from and to pinned memory, an assumption.
HOST_SHARE = 0.8
# Times that the rows of a recurrence's convolution are read or written in a layer's forward, without the rule.
LINEAR_PASSES = 4
# The same for the time of the gated delta rule, forward and backward (which runs it again): 2.07 and 8.51 ms of an H200
# for 32,768 tokens with 16 key heads and 32 value heads of 128 (``benchmarks/layers/recurrence.py``).
RULE_PASSES = (10, 42)
# Seconds that a host needs to launch a layer that runs as one function, and the rest of a pass: forward, backward.
DIRECT_FLOORS_PER_LAYER, FLOORS = (0.354e-3, 0.713e-3), (3.2e-3, 2.6e-3)


@dataclass(frozen=True)
class Gpu:
    """Rates of a data sheet.

    Attributes:
        name: a part of the name that CUDA reports.
        flops_16, flops_32: dense FLOP/s in bfloat16 and in float32.
        memory, link, host: bytes/s of the memory, to other GPUs of a node and to the host, in one direction.
    """

    name: str
    flops_16: float
    flops_32: float
    memory: float
    link: float
    host: float


# The first whose name is part of the reported one counts.
GPUS = (
    Gpu("GB200", 2500e12, 80e12, 8.0e12, 900e9, 450e9),
    Gpu("B300", 2250e12, 80e12, 8.0e12, 900e9, 64e9),
    Gpu("B200", 2250e12, 80e12, 8.0e12, 900e9, 64e9),
    Gpu("GH200", 989e12, 67e12, 4.0e12, 450e9, 450e9),
    Gpu("H200", 989e12, 67e12, 4.8e12, 450e9, 64e9),
    Gpu("H100 PCIe", 756e12, 51e12, 2.0e12, 64e9, 64e9),
    Gpu("H100 NVL", 835e12, 60e12, 3.9e12, 300e9, 64e9),
    Gpu("H100", 989e12, 67e12, 3.35e12, 450e9, 64e9),
    Gpu("H800", 989e12, 67e12, 3.35e12, 200e9, 64e9),
    Gpu("H20", 148e12, 44e12, 4.0e12, 450e9, 64e9),
    Gpu("A100", 312e12, 19.5e12, 2.0e12, 300e9, 32e9),
    Gpu("A800", 312e12, 19.5e12, 2.0e12, 200e9, 32e9),
    Gpu("L40", 362e12, 91e12, 0.86e12, 32e9, 32e9),
    Gpu("A10", 125e12, 31e12, 0.6e12, 32e9, 32e9),
)
# For a GPU that the table lacks.
ASSUMED = "H100"


@dataclass(frozen=True)
class LayerSplit:
    """How the layers of a model run on each rank.

    Attributes:
        is_16_bit: whether products run in bfloat16 or float16.
        tensor_size, sequence_parallel: tensor parallelism.
        context_size: ranks that divide the tokens of a segment, and the heads of its attention.
        direct: whether a layer runs as one function, with few launches (``layers.fused_autograd_layer``).
        expert_ranks: number of ranks over which experts are divided.
        expert_tensor_size: tensor parallelism of each expert.
    """

    is_16_bit: bool = True
    tensor_size: int = 1
    sequence_parallel: bool = False
    direct: bool = True
    expert_ranks: int = 1
    context_size: int = 1
    expert_tensor_size: int = 1


def gpu_named(reported: str) -> tuple[Gpu, bool]:
    """The GPU with this reported name, and whether the table has it; otherwise the assumed one."""
    match = next((gpu for gpu in GPUS if gpu.name in reported), None)
    return match or next(gpu for gpu in GPUS if gpu.name == ASSUMED), match is not None


def gpu_cost_model(shape: DecoderShape, gpu: Gpu, split: LayerSplit, segment_tokens: int) -> CostModel:
    """The cost model of a decoder on a rank's GPU; experts count as products at the layers' rate."""
    peak = gpu.flops_16 if split.is_16_bit else gpu.flops_32
    size, width = split.tensor_size, 2 if split.is_16_bit else 4
    attention, parts = shape.num_attention_layers / shape.num_layers, shape.part_share()
    recurrent = sum(map(shape.is_recurrent, range(shape.num_layers))) / shape.num_layers
    undivided = 8 * parts * shape.hidden_size / (size if split.sequence_parallel else 1)
    mixed = attention * 2 * (shape.query_width + 2 * shape.kv_width)
    mixed += recurrent * LINEAR_PASSES * shape.recurrent_channels
    rule = recurrent * width * shape.recurrent_channels / size / (MEMORY_SHARE * gpu.memory)
    widths = sum(map(shape.layer_width, range(shape.num_layers)))
    divided = (mixed + 3 * widths / shape.num_layers) / size
    summed = 4 * parts * (size - 1) / size * shape.hidden_size
    layer = 2 * shape.layer_weights / shape.num_layers / size / (GEMM_SHARE * peak)
    layer += width * (undivided + divided) / (MEMORY_SHARE * gpu.memory)
    # Two sums over the tensor group in the forward and two in the backward, whose other work takes twice as long. The
    # same holds for the exchange of tokens.
    if any(shape.moe_layers):
        # A token goes to all other ranks of its experts, and a sum comes back from each; a tensor rank sends its part.
        others = split.expert_ranks * split.expert_tensor_size - 1
        summed += 2 * others / size * shape.hidden_size * sum(shape.moe_layers) / shape.num_layers
    layer_sums = width * summed / (LINK_SHARE * gpu.link)
    # Queries, keys and values go to the ranks of their heads, and the output comes back; in the backward the gradients
    # do, and queries and output once more. Each takes a copy on both sides.
    ranks = split.context_size
    kv_width = max(shape.kv_width, size * ranks * shape.kv_channels)  # each rank has a head
    channels = attention * (2 * shape.query_width + 2 * kv_width) + recurrent * shape.recurrent_exchanged
    exchanged = width * channels / size * (ranks - 1) / ranks
    layer += exchanged * (1 / (LINK_SHARE * gpu.link) + 4 / (MEMORY_SHARE * gpu.memory))
    tokens = [
        shape.num_layers * (layer * passes + rule * of_rule + layer_sums) / ranks
        for passes, of_rule in zip((1, 2), RULE_PASSES, strict=True)
    ]
    size *= ranks
    pair = 4 * shape.num_attention_layers * shape.pair_width / size / peak
    # A segment expands the latents of its path, once more in its backward.
    expansion = 2 * shape.num_attention_layers * shape.expansion / segment_tokens / size / (GEMM_SHARE * peak)
    shares = ATTENTION_SHARES if shape.kv_channels <= 128 else WIDE_ATTENTION_SHARES
    pairs = [
        pair * passes / share + expansion * times for passes, share, times in zip((1, 2.5), shares, (1, 3), strict=True)
    ]
    edge = 2 * shape.hidden_size * shape.vocab_size / size / peak
    edges = [edge * passes / share for passes, share in zip((1, 2), LOGIT_SHARES, strict=True)]
    per_layer = DIRECT_FLOORS_PER_LAYER if split.direct else (FORWARD_FLOOR_PER_LAYER, BACKWARD_FLOOR_PER_LAYER)
    floors = [
        shape.num_layers * per_layer_floor + rest for per_layer_floor, rest in zip(per_layer, FLOORS, strict=True)
    ]
    return CostModel.of_passes(tokens, pairs, edges, floors, segment_tokens)


def least_offload_tokens(
    gpu: Gpu, fraction: float, heads: tuple[float, float], element_bytes: int, rate: float | None = None
) -> float:
    """Tokens of a segment from which its attention alone takes longer than the copies of its path, however long.

    Both are proportional to the path. A layer's backward copies K, V and the accumulators in, and the accumulators out,
    one after the other, because its buffer is needed for both. Layers on the device compute meanwhile, too.

    Args:
        fraction: share of the layers whose K/V slots are on the host.
        heads: a rank's query heads and its key/value heads; only their ratio matters.
        rate: measured bytes/s of copies; None for the share of the data sheet's that is assumed.
    """
    query, kv = heads
    peak, accumulator = gpu.flops_16 if element_bytes == 2 else gpu.flops_32, max(4, element_bytes)
    copied = (2 * kv * element_bytes, 2 * kv * (element_bytes + 2 * accumulator))
    computed = [4 * query * passes / share / peak for passes, share in zip((1, 2.5), ATTENTION_SHARES, strict=True)]
    host = rate or HOST_SHARE * gpu.host
    return fraction * max(moved / host / seconds for moved, seconds in zip(copied, computed, strict=True))
