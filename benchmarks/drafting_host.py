"""Processor time that drafting adds to a rollout batch while no drafts are tried: 512 requests, 56,000 random tokens.

    python benchmarks/drafting_host.py [--batches 24]

The calls of an engine without a model, in bursts of 8 passes; the same without drafting is subtracted. Other processes
of the machine do not count. The tree of another version on PYTHONPATH is measured as well.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np

from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.sampling.in_process.drafting import Drafting, NoDrafting, Round
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.in_process.suffix_drafting import SuffixDrafting
from megatron_dta.sampling.interface import GenerationRequest
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.speculation.drafter import DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.gate import SpeculationGate
from megatron_dta.sampling.speculation.speculator import Speculator

PROMPTS, SAMPLES, PROMPT, LONGEST, BURST, VOCAB = 32, 16, 60, 160, 8, 49_000


def batch(drafting: Any, number: int, rng: np.random.Generator) -> float:
    """Processor seconds of a batch."""
    prompts = [rng.integers(0, VOCAB, PROMPT).astype(np.int32) for _ in range(PROMPTS)]
    rows = [
        Request(GenerationRequest(i, prompts[i // SAMPLES], LONGEST, i), i, 16, None) for i in range(PROMPTS * SAMPLES)
    ]
    lengths = np.clip(rng.normal(110, 25, len(rows)).astype(int), 10, LONGEST)
    texts = [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]
    began = time.process_time()
    drafting.weights_changed(number)
    drafting.started(SamplingParams(LONGEST, 1))
    for row in rows:
        row.is_running = True
    drafting.submitted(rows)
    live = list(range(len(rows)))
    while live:
        drafting.wants(len(live))
        appended = [texts[i][len(rows[i].response) :][:BURST] for i in live]
        for i, tokens in zip(live, appended, strict=True):
            rows[i].extend(tokens, np.zeros(len(tokens)))
        drafting.verified(Round([rows[i] for i in live], None, appended, BURST * 1.6e-3, len(live)))
        finished = [rows[i] for i in live if len(rows[i].response) == lengths[i]]
        for row in finished:
            row.is_running = False
        drafting.finished(finished)
        drafting.ran(BURST * (1e-3 + 1.2e-6 * len(live)))
        if getattr(drafting, "_clock", None) is not None:
            drafting._clock.is_on = False
        live = [i for i in live if rows[i].is_running]
    drafting.ended()
    for name in ("rest", "_wait"):  # of versions that fill trees beside training
        getattr(drafting, name, lambda: None)()
    drafting.timing()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=24, help="more than 18, as the window is 16 batches")
    arguments = parser.parse_args()
    initialize_parallel(1)
    cost = ForwardCost()
    suffix = SuffixDrafting(Speculator(DrafterParams(), SpeculationGate(cost, cost)))
    seconds: dict[str, list[float]] = {}
    draftings: dict[str, Drafting] = {"none": NoDrafting(), "das": suffix}
    for name, drafting in draftings.items():
        rng = np.random.default_rng(0)
        seconds[name] = [batch(drafting, number, rng) for number in range(arguments.batches)]
    added = [1e3 * (das - none) for das, none in zip(seconds["das"], seconds["none"], strict=True)]
    figures = {"added_ms": median(added[2:16]), "added_ms_with_eviction": median(added[17:])}
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
