"""Measures the products of a layer's experts on a GPU: grouped kernels against one product for each expert.

    python benchmarks/layers/grouped_products.py [--experts 32 128] [--rows 32768] [--output FILE]

Shapes are those of Qwen3-30B-A3B's first map by default. "by index" reads the rows of the inputs (of the weight
gradients: one of the two tensors) from those of an eighth as many tokens. Beside our kernels runs PyTorch's
``grouped_mm``, for which the matrices of all experts are one tensor: its weight gradients are those in bfloat16, not
yet added to float32 buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.report import Report
from dta_kernels.experts.reference import PlainRows
from layers.attention import measure_gemm, milliseconds
from megatron_dta.common.command_line import CommandLineParser, print_json
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError

Calls = dict[str, dict[str, Callable[[], Any]]]


def calls(counts: list[int], outputs: int, inputs: int, device: torch.device) -> Calls:
    """By product, how each code runs it on the same random tensors."""
    from dta_kernels.experts.grouped_products import GroupedRows, MatrixTable

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, grad, stacked = normal(sum(counts), inputs), normal(sum(counts), outputs), normal(len(counts), outputs, inputs)
    matrices = stacked.unbind()
    sums = torch.zeros(len(counts), outputs, inputs, device=device).unbind()
    table, sums_table, loop = MatrixTable(matrices), MatrixTable(sums), PlainRows(counts)
    on_device = torch.tensor(counts, device=device)
    tokens = max(1, len(x) // 8)
    index = torch.randint(tokens, (len(x),), device=device)
    few_x, few_grad = normal(tokens, inputs), normal(tokens, outputs)

    def rows() -> GroupedRows:
        return GroupedRows(on_device, x, len(x), index)

    ends = on_device.cumsum(0).int()
    grouped_mm = torch.nn.functional.grouped_mm
    return {
        "product": {
            "grouped": lambda: rows().product(x, table),
            "by index": lambda: rows().product(few_x, table, indexed=True),
            "one by one": lambda: loop.product(x, matrices),
            "grouped_mm": lambda: grouped_mm(x, stacked.transpose(1, 2), offs=ends),
        },
        "input gradient": {
            "grouped": lambda: rows().input_gradient(grad, table),
            "by index": lambda: rows().input_gradient(few_grad, table, indexed=True),
            "one by one": lambda: loop.input_gradient(grad, matrices),
            "grouped_mm": lambda: grouped_mm(grad, stacked, offs=ends),
        },
        "weight gradients": {
            "grouped": lambda: rows().add_weight_gradients(sums_table, grad, x),
            "by index": lambda: rows().add_weight_gradients(sums_table, grad, few_x, "x"),
            "one by one": lambda: loop.add_weight_gradients(sums, grad, x),
            "grouped_mm": lambda: grouped_mm(grad.t(), x, offs=ends),
        },
    }


def main() -> None:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--experts", type=int, nargs="+", default=[32, 128], help="experts of a rank")
    parser.add_argument("--rows", type=int, default=32768, help="rows of all experts")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=1536, help="of each expert's matrix")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    arguments = parser.parse_args()
    for name in ("experts", "rows", "hidden_size", "outputs"):
        value = getattr(arguments, name)
        least = min(value) if isinstance(value, list) else value
        if least < 1:
            raise InputError(f"--{name.replace('_', '-')} {least}: must be at least 1")
    if not torch.cuda.is_available():
        raise InputError("benchmarks/layers/grouped_products.py measures a CUDA GPU, and there is none here")
    device = torch.device("cuda")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output", "json")}
    what = "benchmarks/layers/grouped_products.py: products of a layer's experts"
    report = Report(what, settings, device, arguments.output)
    report.results["gemm_tflops"] = measure_gemm(device, torch.bfloat16)
    print(f"GEMM {report.results['gemm_tflops']:.0f} TFLOP/s", flush=True)
    for experts in arguments.experts:
        torch.manual_seed(experts)
        # Uneven, as a router's are.
        shares = torch.rand(experts) + 0.5
        counts = (arguments.rows * shares / shares.sum()).long().tolist()
        for name, codes in calls(counts, arguments.outputs, arguments.hidden_size, device).items():
            for code, call in codes.items():
                flop = 2 * sum(counts) * arguments.outputs * arguments.hidden_size

                def measure(call: Callable[[], Any] = call, flop: int = flop) -> dict[str, Any]:
                    call()
                    time = milliseconds(call)
                    return {"ms": time, "tflops": flop / time / 1e9}

                report.attempt({"experts": experts, "rows": sum(counts), "product": name, "code": code}, measure)
    if arguments.json:
        print_json(report.results)


if __name__ == "__main__":
    run_entry_point(main)
