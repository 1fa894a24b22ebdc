"""Measures tree attention on the trees of rollout files: TFLOP/s on visible pairs, forward and backward, on a GPU.

    python benchmarks/layers/attention.py FILE... [--impl triton fa4] [--tokens 32768] [--segment-tokens 2048 4096 8192]
        [--sweep] [--output benchmarks/results/attention.json] [--json]

From every file the first sequences are taken whose tree has at most --tokens tokens. Measured are the whole tree as
one segment, and of the segments that the planner cuts of it for each of --segment-tokens, all together and the largest.
--impl names what computes tree attention: our kernels, FlashAttention 4, or both in turn on every case. Beside them
run FlexAttention with the same mask (on whole trees), and cuDNN's and FlashAttention's attention where a mask
they know applies: a causal chain, and queries on a full prefix. A forward pass counts 4 x head size FLOPs for a visible
pair and query head, a backward pass 10. The kernels' results are checked against the plain reference in float32 before
anything is measured, and for every setting that is tried.

--sweep tries other settings of the kernels on the first file (on the largest segment of the first size, or the whole
tree where no sizes are given), prints the best and measures the files with them; they belong into the table of
``dta_kernels/tree_attention/config.py``. Results are written after every measurement.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.attention_candidates import (
    forward_candidates,
    key_gradient_candidates,
    query_gradient_candidates,
)
from common.attention_cases import AttentionCase, chain, choose_sequences, probe_case, segment_cases, whole_tree
from common.attention_timing import Inputs, Kernels, check, measure_flex, measure_kernels, milliseconds, rates
from common.flash_attention.plan import flash_refusal
from common.report import Report
from dta_kernels.tree_attention.config import TreeAttentionConfig, default_config, padded_head_size
from dta_kernels.tree_attention.plan import AttentionShape
from megatron_dta.common.command_line import CommandLineParser, print_json
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.tree import build_prefix_tree

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Relative error against float32 that 16-bit kernels stay under by far; a wrong mask or tile is above it by far.
LARGEST_ERROR = 0.03
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def measure_library(inputs: Inputs, backend: str, causal: bool) -> dict[str, Any]:
    """A library's kernel: causal on as many keys as queries, or all queries on all keys."""
    q, k, v = (x.transpose(0, 1)[None].detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    grad_out = inputs.grad_out.transpose(0, 1)[None]

    def forward() -> Any:
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=inputs.scale, enable_gqa=True)

    out = forward()
    pairs = inputs.case.pairs if causal else inputs.q.shape[0] * inputs.k.shape[0]
    backward = lambda: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)  # noqa: E731
    return rates(inputs, forward, backward, pairs)


def measure_gemm(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a matrix product of size 8192."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=dtype) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def checked(inputs: Inputs, probe: Inputs, kernels: Kernels, backward_only: bool) -> dict[str, Any]:
    """Rates on ``inputs`` after a check on ``probe``; results that are wrong are an error, not a rate."""
    error = check(probe, kernels)
    if not error < LARGEST_ERROR:
        raise ArithmeticError(f"wrong results: relative error {error:.3g}")
    return {"relative_error": error, **measure_kernels(inputs, kernels, backward_only)}


def sweep(report: Report, inputs: Inputs, probe: Inputs, hopper: bool) -> TreeAttentionConfig:
    """Try the candidates one kernel after the other, each with the best of those before; the best of all."""
    shape = inputs.shape
    best = default_config(shape.head_size, shape.dtype, inputs.device)
    padded = max(64, padded_head_size(shape.head_size))
    tma = padded == shape.head_size
    hopper = hopper and tma
    stages = (
        ("forward", lambda base: forward_candidates(base, padded, tma, hopper)),
        ("key_gradients", lambda base: key_gradient_candidates(base, padded, hopper)),
        ("query_gradients", lambda base: query_gradient_candidates(base, padded, tma)),
    )
    for stage, candidates in stages:
        directions = ["forward"] if stage == "forward" else ["backward"]
        times: list[tuple[float, TreeAttentionConfig]] = []
        for config in [best, *candidates(best)]:
            names = {"case": inputs.case.name, "sweep": stage, "config": _short(config, stage)}
            row = report.attempt(
                names, lambda c=config, d=directions: checked(inputs, probe, Kernels(config=c), d == ["backward"])
            )
            if row is not None:
                times.append((sum(row[f"{direction}_ms"] for direction in directions), config))
        if times:
            best = min(times, key=lambda pair: pair[0])[1]
            print(f"best {stage} on {inputs.case.name}: {_short(best, stage)}", flush=True)
    report.results.setdefault("best", {})[inputs.case.name] = asdict(best)
    report.write()
    return best


def _short(config: TreeAttentionConfig, stage: str) -> str:
    def describe(name: str) -> str:
        kernel = getattr(config, name)
        tma = " hopper" if kernel.hopper else " tma" if kernel.tma else ""
        launch = f"warps {kernel.num_warps} stages {kernel.num_stages} pack {kernel.max_pack}{tma}"
        return f"{name} {kernel.rows}x{kernel.keys} {launch}"

    if stage != "query_gradients":
        return describe(stage)
    return f"{describe('query_gradients')} stored {config.stored_scores_bytes >> 20} MiB"


def measure_file(
    report: Report,
    path: Path,
    arguments: argparse.Namespace,
    shape: AttentionShape,
    kernels: list[Kernels],
) -> None:
    """Whole tree and segments of one file."""
    device = torch.device("cuda")
    step_case, by_size = cases_of_file(path, arguments.tokens, arguments.segment_tokens)
    inputs = Inputs(step_case, shape, device)
    names = {"case": step_case.name, "tokens": step_case.num_queries, "pairs": step_case.pairs}
    for kernel in kernels:
        report.attempt({**names, "code": kernel.impl}, lambda kernel=kernel: measure_kernels(inputs, kernel))
    if not arguments.skip_flex:
        report.attempt({**names, "code": "flex"}, lambda: measure_flex(inputs))
    for segment_tokens, cases in by_size.items():
        largest = Inputs(max(cases, key=lambda case: case.pairs), shape, device)
        for kernel in kernels:
            names = {"case": f"{step_case.name}/{segment_tokens}", "segments": len(cases), "code": kernel.impl}
            report.attempt(names, lambda cases=cases, kernel=kernel: measure_together(cases, shape, device, kernel))
            names = {
                "case": f"{step_case.name}/{segment_tokens}, largest", "tokens": largest.case.num_queries,
                "keys": len(largest.case.key_end), "code": kernel.impl,
            }  # fmt: skip
            report.attempt(names, lambda largest=largest, kernel=kernel: measure_kernels(largest, kernel))


def measure_together(
    cases: list[AttentionCase], shape: AttentionShape, device: torch.device, kernels: Kernels
) -> dict[str, Any]:
    """All segments of a tree, one after the other, as one figure."""
    rows = [measure_kernels(Inputs(case, shape, device), kernels) for case in cases]
    pairs = sum(case.pairs for case in cases)
    result: dict[str, Any] = {"pairs": pairs}
    for name, factor in (("forward", 4), ("backward", 10)):
        time = sum(row[f"{name}_ms"] for row in rows)
        result[f"{name}_ms"] = time
        result[f"{name}_tflops"] = factor * pairs * shape.num_heads * shape.head_size / time / 1e9
    return result


def cases_of_file(
    path: Path, tokens: int, segment_tokens: list[int]
) -> tuple[AttentionCase, dict[int, list[AttentionCase]]]:
    """The tree of a file's first sequences as one case, and cut into segments of each size."""
    sequences = choose_sequences([rollout.token_ids for rollout in load_rollouts(path)], tokens)
    tree = build_prefix_tree(sequences)
    name = path.name.split(".")[0]
    return whole_tree(tree, name), {size: segment_cases(tree, size, f"{name}/{size}") for size in segment_tokens}


def measure_libraries(report: Report, shape: AttentionShape, tokens: int, kernels: list[Kernels]) -> None:
    """Chains: ours, cuDNN's and FlashAttention's kernels."""
    device = torch.device("cuda")
    for length in (tokens // 2, tokens):
        inputs = Inputs(chain(0, length, f"causal/{length}"), shape, device)
        _measure_each(report, inputs, kernels)
        for backend in BACKENDS:
            report.attempt(
                {"case": inputs.case.name, "code": backend}, lambda i=inputs, b=backend: measure_library(i, b, True)
            )
    for queries in (256, 2048):
        inputs = Inputs(chain(tokens - queries, queries, f"prefix/{queries} of {tokens}"), shape, device)
        _measure_each(report, inputs, kernels)
        for backend in BACKENDS:
            names = {"case": f"{inputs.case.name}, all keys", "code": backend}
            report.attempt(names, lambda i=inputs, b=backend: measure_library(i, b, False))


def _measure_each(report: Report, inputs: Inputs, kernels: list[Kernels]) -> None:
    for kernel in kernels:
        names = {"case": inputs.case.name, "code": kernel.impl}
        report.attempt(names, lambda kernel=kernel: measure_kernels(inputs, Kernels(kernel.impl)))


def main() -> None:
    parser = CommandLineParser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--impl", nargs="+", choices=("triton", "fa4"), default=["triton"], help="what computes tree attention"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="maximum number of tokens in a tree")
    parser.add_argument("--segment-tokens", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8, help="key/value heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--hopper", action="store_true", help="with --sweep: try the Gluon kernels too (Hopper GPUs)")
    parser.add_argument("--sweep", action="store_true", help="try other settings of the kernels, on the first file")
    parser.add_argument(
        "--skip-flex", action="store_true", help="leave out FlexAttention, whose compilation takes long"
    )
    parser.add_argument("--skip-libraries", action="store_true", help="leave out cuDNN's and FlashAttention's kernels")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    arguments = parser.parse_args()
    for name in ("tokens", "heads", "groups", "head_size"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    if arguments.heads % arguments.groups:
        raise InputError(f"--heads {arguments.heads} is not divisible by --groups {arguments.groups}")
    if arguments.hopper and not arguments.sweep:
        raise InputError("--hopper has no effect without --sweep")
    if arguments.sweep and arguments.impl != ["triton"]:
        raise InputError("--sweep tries settings of our kernels only; leave --impl out")
    if not torch.cuda.is_available():
        raise InputError("benchmarks/layers/attention.py measures a CUDA GPU, and there is none here")
    device = torch.device("cuda")
    shape = AttentionShape(arguments.heads, arguments.groups, arguments.head_size, DTYPES[arguments.dtype])
    if "fa4" in arguments.impl and (refusal := flash_refusal(shape, device)):
        raise InputError(f"--impl fa4 {refusal}; leave it out")
    report = Report(
        "benchmarks/layers/attention.py: TFLOP/s of attention on visible pairs, forward and backward",
        {name: getattr(arguments, name) for name in ("heads", "groups", "head_size", "dtype", "tokens")},
        device,
        arguments.output,
    )
    report.results["gemm_8192_tflops"] = measure_gemm(device, shape.dtype)
    print(f"GEMM {report.results['gemm_8192_tflops']:.0f} TFLOP/s", flush=True)
    probe = Inputs(probe_case(), shape, device)
    for impl in arguments.impl:
        error = check(probe, Kernels(impl))
        if not error < LARGEST_ERROR:
            raise InputError(f"results of {impl} are wrong on this GPU: relative error {error:.3g}; run tests/gpu")
    best: TreeAttentionConfig | None = None
    if arguments.sweep:
        step_case, by_size = cases_of_file(arguments.files[0], arguments.tokens, arguments.segment_tokens)
        longest = [max(cases, key=lambda case: case.pairs) for cases in by_size.values()]
        best = sweep(report, Inputs([*longest, step_case][0], shape, device), probe, arguments.hopper)
    if not arguments.skip_libraries:
        measure_libraries(report, shape, arguments.tokens, list(map(Kernels, arguments.impl)))
    for path in arguments.files:
        measure_file(report, path, arguments, shape, [Kernels(impl, best) for impl in arguments.impl])
    if arguments.json:
        print_json(report.results)


if __name__ == "__main__":
    run_entry_point(main)
