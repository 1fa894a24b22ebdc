"""Measures the gated delta rule on a GPU, forward and backward, by the kernels of flash-linear-attention.

    python benchmarks/layers/recurrence.py [--key-heads 16] [--value-heads 32] [--tokens 2048 8192 32768] [--tune]

Heads are those of Qwen3.5-9B by default. Each number of tokens is measured as one run and as runs of --run-tokens. The
first call compiles the kernels; it is timed too. With --tune the library tunes all its kernels, also those whose
settings are fixed here, and the settings that it picks are shown (``dta_kernels/recurrence/library_settings.py``).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.report import Report
from dta_kernels.recurrence import library, library_settings
from dta_kernels.recurrence.contract import Runs
from layers.attention import milliseconds
from megatron_dta.common.command_line import CommandLineParser, check_at_least, print_json
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError


def measure(lengths: list[int], key_heads: int, value_heads: int, head_size: int) -> dict[str, Any]:
    """Seconds of the first call and milliseconds of later ones."""
    device, T, K = torch.device("cuda"), sum(lengths), head_size
    torch.manual_seed(T)
    runs = Runs.of_lengths(lengths, device)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    q, k, v = normal(T, key_heads, K), normal(T, key_heads, K), normal(T, value_heads, K)
    g = -torch.nn.functional.softplus(normal(T, value_heads, dtype=torch.float32) - 3)
    beta = normal(T, value_heads).sigmoid()
    entry = normal(len(lengths), value_heads, K, K, dtype=torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, g, beta)]
    entry.requires_grad_()
    grads = normal(T, value_heads, K), torch.randn_like(entry)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return library.gated_delta_rule(tuple(inputs), entry, runs)

    def both() -> tuple[torch.Tensor, ...]:
        out = library.gated_delta_rule(tuple(inputs), entry, runs)
        return torch.autograd.grad(out, [*inputs, entry], grads)

    begin = time.perf_counter()
    both()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    forward()
    ms, with_gradients = milliseconds(forward), milliseconds(both)
    return {"first_call_seconds": first, "forward_ms": ms, "forward_and_backward_ms": with_gradients}


def main() -> None:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--run-tokens", type=int, default=700, help="tokens of a run where there are several")
    parser.add_argument("--tune", action="store_true", help="tune all kernels and show the settings picked")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "key_heads", "value_heads", "head_size", "run_tokens")
    if min(arguments.tokens) < 1:
        raise InputError(f"--tokens {min(arguments.tokens)}: must be at least 1")
    if not torch.cuda.is_available():
        raise InputError("benchmarks/layers/recurrence.py measures a CUDA GPU, and there is none here")
    if arguments.tune:
        library_settings.HOPPER.clear()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output", "json")}
    report = Report("gated delta rule", settings, torch.device("cuda"), arguments.output)
    for tokens in arguments.tokens:
        size = min(arguments.run_tokens, tokens)
        several = [size] * (tokens // size) + [tokens % size] * (tokens % size > 0)
        for lengths in [[tokens]] + ([several] if len(several) > 1 else []):
            names = {"tokens": tokens, "runs": len(lengths)}
            report.attempt(
                names,
                lambda lengths=lengths: measure(
                    lengths, arguments.key_heads, arguments.value_heads, arguments.head_size
                ),
            )
    if arguments.tune:
        report.results["settings_picked"] = {
            name: library_settings.settings_of(tuner.best_config)
            for name, tuner in library_settings.tuners().items()
            if hasattr(tuner, "best_config")
        }
        for name, chosen in report.results["settings_picked"].items():
            print(f'    "{name}": LaunchSettings{tuple(chosen)},')
        report.write()
    if arguments.json:
        print_json(report.results)


if __name__ == "__main__":
    run_entry_point(main)
