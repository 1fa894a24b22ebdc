"""Measures the fused layer kernels on a GPU: time and memory traffic against a copy, for one segment of a model.

    python benchmarks/layers/fused_layers.py [--model qwen3-1.7b] [--tokens 4096] [--output FILE]

Bytes are those that must be read and written once; a copy of as large a tensor is the bandwidth that can be had. The
plain twins are measured as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.benchmark_model import MODELS
from common.report import Report
from dta_kernels.layers import qkv_rope as qkv
from dta_kernels.layers import reference
from dta_kernels.layers.rms_norm import rms_norm, rms_norm_again, rms_norm_partial_gradients
from dta_kernels.layers.swiglu import swiglu, swiglu_into
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError

DTYPE, EPS = torch.bfloat16, 1e-6
# More than any GPU's cache, so that inputs come from memory as they do in a step.
_FLUSH_BYTES = 512 << 20


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-1.7b")
    parser.add_argument("--tokens", type=int, default=4096, help="rows of the segment")
    parser.add_argument("--repeats", type=int, default=10, help="of which the median counts")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def milliseconds(run: Callable[[], Any], flush: Tensor, repeats: int) -> float:
    """Median time of ``run`` on the device, with cold caches."""
    times = []
    for repeat in range(repeats + 2):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(begin.elapsed_time(end))
    return median(times)


def cases(model: str, N: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """What is measured: a call and its bytes, by name."""
    shape = MODELS[model]
    C, F, D = shape.hidden_size, shape.ffn_hidden_size, shape.kv_channels
    G, H = shape.num_query_groups, shape.num_attention_heads
    layout = qkv.QKVLayout(G, H // G, D)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=DTYPE)

    x, added, grad, grad_residual, weight = random(N, C), random(N, C), random(N, C), random(N, C), random(C)
    normed, residual, rstd = rms_norm(x, weight, EPS, added)
    mixed, q_weight, k_weight = random(N, (H + 2 * G) * D), random(D), random(D)
    angle = torch.rand(N, D // 2, device="cuda") * 1000
    rows = qkv.MixedQKV(mixed, angle.cos(), angle.sin(), q_weight, k_weight, layout, EPS)
    grads = random(N, H, D), random(N, G, D), random(N, G, D)
    query = random(N, H, D)
    gated = random(N, 2 * F).requires_grad_()
    active = swiglu(gated)
    grad_active, again = random(N, F), random(N, F)
    tables, heads = 4 * N * D, 2 * N * D

    def plain_norm() -> None:
        reference.rms_norm(x, weight, EPS, added)

    return {
        "copy": (lambda: added.copy_(x), 4 * N * C),
        "norm": (lambda: rms_norm(x, weight, EPS), 4 * N * C),
        "norm of a sum": (lambda: rms_norm(x, weight, EPS, added), 8 * N * C),
        "norm of a sum, plain": (plain_norm, 8 * N * C),
        "norm again": (lambda: rms_norm_again(residual, rstd, weight, normed), 4 * N * C),
        "norm backward": (lambda: rms_norm_partial_gradients(grad, grad_residual, residual, rstd, weight), 8 * N * C),
        "qkv": (
            lambda: qkv.qkv_rope(rows),
            2 * (H + G) * heads + tables,
        ),
        "qkv, plain": (
            lambda: reference.qkv_rope(*rows[:5], *layout[:2], EPS),
            2 * (H + G) * heads + tables,
        ),
        "queries again": (
            lambda: rows.write(query),
            2 * H * heads + tables,
        ),
        "qkv backward": (
            lambda: rows.partial_gradients(*grads),
            (3 * (H + G) + 2 * G) * heads + tables,
        ),
        "swiglu": (lambda: swiglu_into(gated.detach(), again), 6 * N * F),
        "swiglu, plain": (lambda: reference.swiglu(gated.detach()), 6 * N * F),
        "swiglu backward": (
            lambda: torch.autograd.grad(active, gated, grad_active, retain_graph=True),
            10 * N * F,
        ),
    }


def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise InputError("the fused kernels are measured on a CUDA GPU, and there is none here")
    settings = {key: str(value) for key, value in vars(arguments).items()}
    report = Report("fused layer kernels", settings, torch.device("cuda"), arguments.output)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for name, (run, num_bytes) in cases(arguments.model, arguments.tokens).items():
        ms = milliseconds(run, flush, arguments.repeats)
        report.add({"kernel": name, "ms": ms, "gb_per_second": num_bytes / ms / 1e6})
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry_point(main))
