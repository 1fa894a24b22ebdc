"""Measures the drafter's trees on this machine: microseconds of an inserted token and of a draft, bytes of a token.

    python benchmarks/drafter.py [--depth 24] [--live 64] [--tokens 600] [--output FILE] [--json]

The calls are those of an engine: a few tokens of many samples at once, then a draft for each sample, with a tree for
each problem and one for all. Samples of a problem agree in 19 of 20 tokens. The row "python" is the implementation for
machines without a compiler. The fastest round counts, so that other work on the machine has no effect.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.report import Report
from megatron_dta.common.command_line import CommandLineParser, print_json
from megatron_dta.core.common.errors import InputError, run_entry_point
from megatron_dta.sampling.speculation.native import NativeSuffixForest, NativeUnavailable
from megatron_dta.sampling.speculation.suffix_forest import DraftParams, PythonSuffixForest, SuffixForest

_PROBLEMS, _STEP, _VOCABULARY = 8, 4, 3000


def measure(forest: SuffixForest, live: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Microseconds per inserted token (in both trees) and per draft, and bytes per token."""
    rng = np.random.default_rng(0)
    everything, problems = forest.new_tree(), [forest.new_tree() for _ in range(_PROBLEMS)]
    bases = rng.integers(0, _VOCABULARY, (_PROBLEMS, tokens))
    inserts, drafts = [], []
    for _ in range(rounds):
        texts = np.array([forest.new_text((problems[i % _PROBLEMS], everything)) for i in range(live)], np.uint32)
        others = rng.integers(0, _VOCABULARY, (live, tokens))
        own = np.where(rng.random((live, tokens)) < 0.95, bases[np.arange(live) % _PROBLEMS], others)
        inserting = drafting = 0.0
        for begin in range(0, tokens - _STEP + 1, _STEP):
            new = own[:, begin : begin + _STEP].astype(np.int32).reshape(-1)
            start = time.perf_counter()
            forest.extend(texts, new, np.arange(0, _STEP * live + 1, _STEP))
            middle = time.perf_counter()
            forest.draft(texts, np.full(live, 16, np.int32), DraftParams(width=16))
            drafting += time.perf_counter() - middle
            inserting += middle - start
        for text in texts:
            forest.finish(text)
        passes = (tokens // _STEP) * live
        inserts.append(1e6 * inserting / (passes * _STEP))
        drafts.append(1e6 * drafting / passes)
    return {
        "insert_microseconds": min(inserts),
        "draft_microseconds": min(drafts),
        "bytes_per_token": forest.num_bytes / (rounds * live * (tokens // _STEP) * _STEP),
    }


def main() -> None:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--depth", type=int, default=24, help="tokens of a match and its draft together")
    parser.add_argument("--live", type=int, default=64, help="samples that run at once")
    parser.add_argument("--tokens", type=int, default=600, help="of each sample")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    arguments = parser.parse_args()
    for name, least in (("depth", 2), ("live", 1), ("tokens", _STEP), ("rounds", 1)):
        if getattr(arguments, name) < least:
            raise InputError(f"--{name} {getattr(arguments, name)}: must be at least {least}")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output", "json")}
    report = Report("benchmarks/drafter.py: suffix trees", settings, torch.device("cpu"), arguments.output)
    for name, made in (("c", NativeSuffixForest), ("python", PythonSuffixForest)):
        try:
            forest = made(arguments.depth, min(arguments.depth, 8))
        except NativeUnavailable as error:
            report.add({"code": name, "error": str(error)})
            continue
        rounds = arguments.rounds if name == "c" else 1
        report.add({"code": name, **measure(forest, arguments.live, arguments.tokens, rounds)})
    if arguments.json:
        print_json(report.results)


if __name__ == "__main__":
    run_entry_point(main)
