"""The machines of a planned run and how fast they are: what data sheets say, times how much of it is reached.

Peaks come from a preset or from flags. ``GEMM_TFLOPS`` is what a product of large matrices reaches; that of the H200 is
measured, those of the others are estimates. How much of a peak this project reaches is set by a few shares, fitted to
steps of the 1.7B, 8B, 14B and 70B shapes on one and four H200 (``benchmarks/step_*.json``, within 8%), which a
cost model fitted to measured segments corrects (``run_time.calibrated``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_dta.capacity.shape import RunShape
from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.model import FLOOR_SECONDS_PER_LAYER, CostModel

# Products that a row of logits takes part in: forward, again in the backward, and the two gradients.
LOGIT_PASSES = 4.0
# Attention's backward computes its scores again: 5 products for the forward's 2.
ATTENTION_PASSES = 3.5
GEMM_PASSES = 3.0
# Bytes that a layer's elementwise work moves for each token, by the channels that it reads and writes in the forward
# and in the backward, with fused norms, rotation and activation.
ELEMENTWISE_PASSES = {"hidden": 24.0, "attention": 7.0, "ffn": 9.0}


@dataclass(frozen=True)
class Cluster:
    """GPUs and links.

    Attributes:
        num_gpus, gpus_per_node: in all, and those that NVLink connects.
        gpu_memory_gib: memory of one that a process can have.
        gemm_tflops: operations a second of a large product in bfloat16, over 10^12.
        hbm_gigabytes_per_second: of the GPU's memory.
        nvlink_gbps, network_gbps: gigabits a second and direction, of each GPU.
        host_gigabytes_per_second: at which a GPU's share of the host updates states that are offloaded.
        gemm_share, logit_share, attention_share, hbm_share, link_share: what is reached of gemm_tflops (the first
            three), hbm_gigabytes_per_second and the links.
        short_segment_tokens: in segments of so many tokens products and elementwise work take twice their time.
        floor_seconds_per_layer: what the host takes to launch a layer's forward and backward; a segment takes no less.
        forward_floor_share: the forward's part of that.
    """

    num_gpus: int
    gpus_per_node: int = 8
    gpu_memory_gib: float = 139.0
    gemm_tflops: float = 793.0
    hbm_gigabytes_per_second: float = 4800.0
    nvlink_gbps: float = 3600.0
    network_gbps: float = 400.0
    host_gigabytes_per_second: float = 20.0
    gemm_share: float = 0.89
    logit_share: float = 0.89
    attention_share: float = 0.76
    hbm_share: float = 0.30
    link_share: float = 0.75
    short_segment_tokens: float = 500.0
    floor_seconds_per_layer: float = FLOOR_SECONDS_PER_LAYER
    forward_floor_share: float = CostModel.forward_floor_share

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in ("floor_seconds_per_layer", "forward_floor_share", "short_segment_tokens")
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise InputError(f"--{field.name.replace('_', '-')} must be a number above 0, not {value}")
        if self.num_gpus % min(self.num_gpus, self.gpus_per_node):
            raise InputError(f"--num-gpus {self.num_gpus} is not a multiple of --gpus-per-node {self.gpus_per_node}")

    def link(self, num_ranks: int, stride: int = 1) -> float:
        """Bytes a second between ``num_ranks`` ranks that are ``stride`` apart: NVLink while a node holds them all."""
        gigabits = self.nvlink_gbps if num_ranks * stride <= self.gpus_per_node else self.network_gbps
        return gigabits * 1e9 / 8 * self.link_share

    @property
    def hbm_rate(self) -> float:
        """Bytes a second that elementwise work reaches."""
        return self.hbm_gigabytes_per_second * 1e9 * self.hbm_share

    @property
    def gemm_rate(self) -> float:
        """Operations a second that the layers' products reach."""
        return self.gemm_tflops * 1e12 * self.gemm_share

    @property
    def logit_rate(self) -> float:
        """Operations a second that the products with the output matrix reach."""
        return self.gemm_tflops * 1e12 * self.logit_share

    @property
    def attention_rate(self) -> float:
        """Operations a second that attention reaches."""
        return self.gemm_tflops * 1e12 * self.attention_share


def elementwise_channels(shape: RunShape, layer: int) -> tuple[float, float, float]:
    """Channels read and written for a token: of hidden states, of attention, of the feed-forward layer."""
    passes = ELEMENTWISE_PASSES
    hidden = shape.hidden_size
    if shape.moe_layers[layer]:
        # Tokens are put into their experts' order and brought back.
        width = shape.moe_router_topk * shape.expert_width + (shape.moe_shared_expert_intermediate_size or 0)
        hidden += shape.moe_router_topk * shape.hidden_size / 2
    else:
        width = shape.ffn_hidden_size
    attention = shape.query_width + 2 * shape.kv_width
    return passes["hidden"] * hidden, passes["attention"] * attention, passes["ffn"] * width


_H200: dict[str, float] = {}
PRESETS: Mapping[str, Mapping[str, float]] = {
    "h200": _H200,
    "h100": {"gpu_memory_gib": 79.0, "gemm_tflops": 750.0, "hbm_gigabytes_per_second": 3350.0},
    "a100": {
        "gpu_memory_gib": 79.0,
        "gemm_tflops": 270.0,
        "hbm_gigabytes_per_second": 2000.0,
        "nvlink_gbps": 2400.0,
        "network_gbps": 200.0,
    },
}
