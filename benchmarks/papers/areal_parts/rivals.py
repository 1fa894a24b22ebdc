"""The rivals of the AReaL-DTA experiment: quoted figures, and packed trees on other attention where a GPU has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.attention_cases import AttentionCase
from common.attention_timing import Inputs, Kernels, measure_flex, measure_kernels
from common.training_step import StepTimer
from dta_kernels.tree_attention.blocks import local_key_end
from dta_kernels.tree_attention.plan import AttentionShape
from megatron_dta.core.common.files import read_json
from megatron_dta.core.engine import TreeBatch
from papers.areal_parts.steps import StepSettings
from papers.areal_parts.workload import RolloutSet
from papers.tables import PaperReport

COLUMNS = {
    "system": "system",
    "seconds": "seconds",
    "peak_memory_gib": "peak GiB",
    "source": "source",
    "command": "command",
}
ATTENTION_COLUMNS = {
    "set": "set",
    "code": "code",
    "tokens": "tokens",
    "forward_ms": "forward, ms",
    "forward_tflops": "forward, TFLOP/s",
    "backward_ms": "backward, ms",
    "backward_tflops": "backward, TFLOP/s",
}
# The workload of the quoted figures, which this run must have to be compared with them.
QUOTED_MODEL, QUOTED_SET, QUOTED_TRAJECTORIES = "qwen3-1.7b", "tau1_airline_gpt4o_4x50", 40
SOURCE = "quoted: the rival's own code, measured outside this repository, one H200, November 2026"
STEP = (
    "python benchmarks/train.py --bf16 --model qwen3-1.7b --max-sequences 40 "
    "$DTA_ROLLOUTS/tau1_airline_gpt4o_4x50.npz --steps 2"
)
NO_COMMAND = (
    "code: areal/experimental/dta of areal-project/AReaL, branch feat/dta; the driver is not in this repository"
)
QUOTED = (
    ("AReaL-DTA, blocks of 2,048", 14.4, 21.6, NO_COMMAND),
    ("AReaL-DTA, blocks of 4,096", 11.7, 30.6, NO_COMMAND),
    ("transformers, dense one by one, recomputation", 17.9, 31.6, "nearest here: the modes above"),
    (
        "Megatron-Core 0.19 + Transformer Engine, dense packed to 16k",
        8.46,
        63.8,
        f"nearest here: {STEP} --tree-mode dense --transformer-impl transformer_engine",
    ),
    ("the same to 32k, full recomputation", 10.4, 79.2, "nearest here: the same"),
    (
        "Megatron-Core + Transformer Engine, packed trees of up to 16k, FlexAttention",
        8.01,
        66.4,
        f"nearest here: {STEP} --tree-mode packed --pack-tokens 16384",
    ),
    ("the same, trees of up to 24k", 6.68, 94.7, f"nearest here: {STEP} --tree-mode packed --pack-tokens 24576"),
)
RESULTS = Path(__file__).resolve().parents[2] / "results"
# Runs of this project on the same work: file, commit, part of the command line, and mode.
STORED = (
    ("trees, memory of the GPU", "step_1.7b_h200.json", "f9dfa8b", "default.json", "dta"),
    ("trees, 40 GiB", "step_1.7b_h200.json", "f9dfa8b", "new40.json", "dta"),
    ("trees, FlashAttention 4, memory of the GPU", "step_1.7b_h200.json", "4d3f5a7", "step_fa4.json", "dta"),
    ("trees, layers of Transformer Engine", "transformer_engine_h200.json", "7c55e70", "step_te_bf16.json", "dta"),
    ("dense, packed, memory of the GPU", "step_1.7b_h200.json", "f9dfa8b", "default.json", "dense"),
    ("dense, packed, 40 GiB", "step_1.7b_h200.json", "0c55070", "--tree-mode dense dta", "dense"),
    ("dense, layers of Transformer Engine", "transformer_engine_h200.json", "7c55e70", "step_te_bf16.json", "dense"),
)


def quote_rivals(report: PaperReport) -> None:
    """The figures of others, and those of this project's stored runs on the same work."""
    for system, name, commit, part, mode in STORED:
        runs = read_json(RESULTS / name)["runs"]
        run = next(run for run in runs if run["commit"] == commit and part in run["command"])
        measured = next(row for row in run["rows"] if row["mode"] == mode)
        # Neither its output matters, nor the script's former name.
        command = re.sub(r" --output \S+| --json", "", run["command"]).replace("tools/benchmark_", "benchmarks/")
        row = {key: measured[key] for key in ("seconds", "peak_memory_gib")}
        source = f"stored: benchmarks/results/{name}, {run['hardware']}, {run['date']}, {commit}"
        report.add("rivals", {"system": f"this project: {system}", **row, "source": source, "command": command})
    for system, seconds, memory, command in QUOTED:
        row = {"system": system, "seconds": seconds, "peak_memory_gib": memory, "source": SOURCE, "command": command}
        report.add("rivals", row)


def measure_rivals(report: PaperReport, timer: StepTimer, rollouts: RolloutSet, settings: StepSettings) -> None:
    """This run's modes next to the quoted rows, and the attention of the largest pack on other kernels, on a GPU."""
    for row in report.rows("modes"):
        if row["set"] == rollouts.name and row["sample"] == "trajectory" and "seconds" in row:
            _add(report, f"this run: {row['mode']}", row)
    batch = timer.plan(rollouts.trajectories, settings.tree("packed", rollouts.longest))
    measure_attention(report, timer, rollouts.name, batch)


def _add(report: PaperReport, system: str, row: dict[str, Any]) -> None:
    source = "measured in this run"
    report.add("rivals", {**row, "system": system, "source": source, "command": "this one"})


def measure_attention(report: PaperReport, timer: StepTimer, name: str, batch: TreeBatch) -> None:
    """Attention of one layer on the largest pack of trees: our kernels, FlashAttention 4 and FlexAttention."""
    shape, dtype = timer.engine.shape, timer.model_config.params_dtype
    call = AttentionShape(shape.num_attention_heads, shape.num_query_groups, shape.kv_channels, dtype)
    inputs = Inputs(largest_pack(batch), call, torch.device("cuda"))
    codes: dict[str, Callable[[], dict[str, Any]]] = {
        "ours (Triton and Gluon)": lambda: measure_kernels(inputs, Kernels("triton")),
        "FlashAttention 4": lambda: measure_kernels(inputs, Kernels("fa4")),
        "FlexAttention": lambda: measure_flex(inputs),
    }
    for code, run in codes.items():
        try:
            row = run()
        except Exception as error:  # compilers and libraries raise many types
            print(f"left out: {code}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        report.add("attention", {"set": name, "code": code, "tokens": inputs.case.num_queries, **row})


def largest_pack(batch: TreeBatch) -> AttentionCase:
    """The attention of the pack with the most tokens."""
    segments = batch.plan.segments
    pack = int(segments.lengths.argmax())
    begin, end = segments.segment_start[pack : pack + 2].tolist()
    ends = segments.tree.subtree_end[begin:end]
    return AttentionCase("pack", end - begin, local_key_end(begin, end - begin, np.zeros(0, np.int64), ends))
