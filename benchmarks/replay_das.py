"""Replays stored samples with speculative decoding from suffix trees (DAS) and reports the time that it saves.

    python benchmarks/replay_das.py FILE --past 4 --live-batch 390 --stop-degenerate [--json]

FILE is a rollout file (.jsonl, .parquet or .npz); tokens of its loss mask count as generated. The first samples of each
problem (group) are history. The others are decoded again, in waves of about --live-batch samples that start together.
Acceptance is exact: a drafted token is accepted if it equals the sampled one. Seconds follow the cost model
base + per token x max(0, tokens - knee), plus the time to make drafts. There are two runs:

    warm       with the history, and drafts limited by the budget; makespan_saved is the result of this run
    cold       the same samples without history: drafts come from siblings and the sample itself

With --stop-degenerate, samples end where they enter a loop or noise, in plain decoding too, so that the savings of the
stop do not count as savings of drafts (makespan_saved_with_stop includes both).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path

from rich.table import Table

from megatron_dta.common.command_line import CommandLineParser, check_at_least, print_json
from megatron_dta.common.console import Console
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.sampling.speculation.drafter import DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.gate import SpeculationGate
from megatron_dta.sampling.speculation.lengths import BUDGETS
from megatron_dta.sampling.speculation.native import load_library
from megatron_dta.sampling.speculation.report import SpeculationReport
from megatron_dta.sampling.speculation.speculator import Speculator
from megatron_dta.sampling.speculation.suffix_forest import DraftParams
from rollout_parts.das_replay import (
    RecordedSample,
    plain_makespan,
    recorded_samples,
    remember,
    replay_wave,
    split_history,
    waves,
)

RUNS = ("warm", "cold")
SMALL_TOKENS = 20_000
"""With fewer tokens, starting processes takes longer than they save."""


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    cost, drafter, draft = ForwardCost(), DrafterParams(), DraftParams()
    parser.add_argument("file", metavar="FILE", help="rollouts: .jsonl, .parquet or .npz")
    parser.add_argument("--past", type=int, default=4, metavar="N", help="past samples of a problem (%(default)s)")
    parser.add_argument("--live-batch", type=int, metavar="B", help="samples decoded together (default: all)")
    parser.add_argument("--stop-degenerate", action="store_true", help="end samples that enter a loop or noise")
    parser.add_argument("--das-window", type=int, default=drafter.window, metavar="W", help="steps kept (%(default)s)")
    parser.add_argument("--das-max-tokens", type=int, default=drafter.max_tokens, metavar="N", help="tokens kept")
    parser.add_argument(
        "--das-depth", type=int, default=drafter.depth, metavar="D", help="tokens of match and draft (%(default)s)"
    )
    parser.add_argument(
        "--das-draft-tokens", type=int, default=draft.width, metavar="N", help="maximum tokens of a draft"
    )
    parser.add_argument(
        "--das-budget", choices=BUDGETS, default="straggler", help="rule for the drafts to verify (%(default)s)"
    )
    parser.add_argument(
        "--c-base", type=float, default=cost.base, metavar="S", help="seconds of a forward (%(default)s)"
    )
    parser.add_argument(
        "--c-tok", type=float, default=cost.per_token, metavar="S", help="seconds per token in a forward (%(default)s)"
    )
    parser.add_argument(
        "--c-knee",
        type=float,
        default=cost.knee,
        metavar="N",
        help="tokens per forward without extra cost (%(default)s)",
    )
    parser.add_argument(
        "--c-draft", type=float, default=cost.draft, metavar="S", help="seconds to make a draft (%(default)s)"
    )
    parser.add_argument("--max-sequences", type=int, metavar="N", help="only the first N sequences")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "live_batch", "das_window", "das_max_tokens", "das_draft_tokens", "max_sequences")
    check_at_least(arguments, 0, "past")
    check_at_least(arguments, 2, "das_depth")
    for flag in ("--das-depth", "--das-draft-tokens"):
        if getattr(arguments, flag[2:].replace("-", "_")) > 255:
            raise InputError(f"{flag} must be at most 255")
    if arguments.das_draft_tokens >= arguments.das_depth and arguments.das_draft_tokens != draft.width:
        raise InputError(
            f"--das-draft-tokens {arguments.das_draft_tokens} is not below --das-depth {arguments.das_depth}, the "
            "tokens of a match and its draft together"
        )
    return arguments


def forward_cost(arguments: argparse.Namespace) -> ForwardCost:
    return ForwardCost(arguments.c_base, arguments.c_tok, arguments.c_knee, arguments.c_draft)


def merged(reports: Sequence[SpeculationReport]) -> SpeculationReport:
    """Merge the reports of consecutive waves; the last one has the memory, and the rounds of all waves before it."""
    total = SpeculationReport()
    for entry in fields(total):
        parts = [getattr(report, entry.name) for report in reports]
        if entry.name in ("drafter_bytes", "drafter_tokens", "saved_seconds"):
            value = parts[-1]
        else:
            value = [x for part in parts for x in part] if isinstance(parts[0], list) else sum(parts)
        setattr(total, entry.name, value)
    return total


def replay(
    history: Sequence[Sequence[RecordedSample]],
    parts: Sequence[Sequence[RecordedSample]],
    arguments: argparse.Namespace,
) -> SpeculationReport:
    drafter = DrafterParams(
        depth=arguments.das_depth,
        window=arguments.das_window,
        max_tokens=arguments.das_max_tokens,
        draft=DraftParams(width=arguments.das_draft_tokens),
    )
    cost = forward_cost(arguments)
    gate = SpeculationGate(cost, cost, prices_whole=True)
    # Use the seconds of the cost model, not the clock of this machine.
    speculator = Speculator(drafter, gate, arguments.das_budget)
    remember(speculator, history)
    return merged([replay_wave(speculator, part, len(history)) for part in parts])


def run_all(jobs: Sequence[tuple]) -> list[SpeculationReport]:
    """Run the replays, in parallel if there are several processors."""
    load_library()  # Compile it, and print its messages, before starting processes.
    workers = min(len(jobs), os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count() or 1)
    if workers == 1 or sum(len(sample.generated) for part in jobs[0][1] for sample in part) < SMALL_TOKENS:
        return [replay(*job) for job in jobs]
    with ProcessPoolExecutor(workers) as pool:
        return [run.result() for run in [pool.submit(replay, *job) for job in jobs]]


def run_figures(report: SpeculationReport, plain: float) -> dict[str, object]:
    return {"makespan_saved": 1 - report.makespan / plain, "plain_makespan_seconds": plain, **report.figures()}


def compare(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the figures of all runs."""
    begin = time.perf_counter()
    cost = forward_cost(arguments)
    rollouts = load_rollouts(arguments.file, max_sequences=arguments.max_sequences)
    if arguments.das_window < arguments.past:
        print(
            f"--das-window {arguments.das_window} keeps fewer than the {arguments.past} past samples of --past",
            file=sys.stderr,
        )
    history, now = split_history(recorded_samples(rollouts, arguments.stop_degenerate), arguments.past)
    parts = waves(now, arguments.live_batch)
    plain = sum(plain_makespan(part, cost) for part in parts)
    reports = run_all([(history, parts, arguments), ([[]], parts, arguments)])
    results = {name: run_figures(report, plain) for name, report in zip(RUNS, reports, strict=True)}
    full = split_history(recorded_samples(rollouts), arguments.past)[1]
    unstopped = sum(plain_makespan(part, cost) for part in waves(full, arguments.live_batch))
    warm = results["warm"]
    values = {
        "tokens_per_forward": warm["tokens_per_forward"],
        "makespan_saved": warm["makespan_saved"],
        "makespan_saved_cold": results["cold"]["makespan_saved"],
        "makespan_saved_with_stop": 1 - warm["makespan_seconds"] / unstopped,
        "drafter_bytes_per_token": warm["drafter_bytes_per_token"],
        "samples": len(now),
        "waves": len(parts),
        "stopped_degenerate": sum(sample.stopped for sample in now),
        "cost": {"base": cost.base, "per_token": cost.per_token, "knee": cost.knee, "draft": cost.draft},
        **results,
    }
    values["seconds"] = time.perf_counter() - begin
    return values


def print_table(values: dict[str, object], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("figure", no_wrap=True)
    for name in RUNS:
        table.add_column(name, justify="right", no_wrap=True)
    rows = {
        "makespan saved": lambda v: f"{v['makespan_saved']:.1%}",
        "makespan (seconds)": lambda v: f"{v['makespan_seconds']:.2f}",
        "plain decoding (seconds)": lambda v: f"{v['plain_makespan_seconds']:.2f}",
        "tokens per forward": lambda v: f"{v['tokens_per_forward']:.2f}",
        "of the 4 longest": lambda v: f"{v['tokens_per_forward_longest_4']:.2f}",
        "generated tokens": lambda v: f"{v['generated_tokens']:,}",
        "drafted tokens": lambda v: f"{v['drafted_tokens']:,}",
        "rejected tokens": lambda v: f"{v['wasted_tokens']:,}",
        "drafting (seconds, measured)": lambda v: f"{v['draft_seconds']:.2f}",
        "drafter (bytes per token)": lambda v: f"{v['drafter_bytes_per_token']:.0f}",
    }
    for label, show in rows.items():
        table.add_row(label, *(show(values[name]) for name in RUNS))
    Console().print(table)


def main() -> None:
    arguments = parse_arguments()
    values = compare(arguments)
    stopped = f", {values['stopped_degenerate']} stopped" if arguments.stop_degenerate else ""
    title = f"{Path(arguments.file).name}: {values['samples']:,} samples in {values['waves']} waves{stopped}"
    print_table(values, f"{title}, {arguments.past} past samples of each problem")
    if arguments.json:
        print_json(values)


if __name__ == "__main__":
    run_entry_point(main)
