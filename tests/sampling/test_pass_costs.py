"""The cost of a pass is measured before the first rollout batch and changes nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.sampling.in_process import engine as in_process
from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
from megatron_dta.sampling.in_process.pass_costs import measure_passes
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from mesh_worker import run_on_ranks
from rollout_forest import NEVER
from sampling_cases import make_model, random_prompts
from speculation_exact_cases import suffix_drafting

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 48 --task arithmetic "
    "--arithmetic-max-operand 9 --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 7 --lr 1e-3 "
    "--rollout-speculation das --old-logprobs recompute --train-iters 1"
)


@pytest.mark.parametrize("static", [False, True])
def test_costs_are_those_of_the_passes(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the passes move: 5 ms and 40 microseconds a token, and 3 ms more with drafts."""
    seed_all(static)
    drafting = suffix_drafting()
    engine = InProcessEngine(make_model(3, torch.float32), EngineSettings(static_passes=static), drafting)
    clock = [0.0]
    monkeypatch.setattr(in_process, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    take = engine._take

    def slow(rows, sampled, drafts, began, num_tokens):
        passes = max(len(tokens) for tokens, _ in sampled) if drafts is None else 1
        is_drafted = drafts is not None and any(map(len, drafts))
        clock[0] += passes * (5e-3 + 4e-5 * num_tokens) + 3e-3 * is_drafted
        return take(rows, sampled, drafts, began, num_tokens)

    monkeypatch.setattr(engine, "_take", slow)
    passes = measure_passes(engine, SamplingParams(7, 3, temperature=0.7), 40, 96)
    assert engine.drafting is drafting
    assert engine.pages_in_use == 0
    tokens, seconds, kinds = np.array(passes).T
    assert {1, 5, 20, 40} <= set(tokens[kinds == 0]) <= set(range(1, 41))
    assert tokens[kinds == 1].max() == 40 * 8
    np.testing.assert_allclose(seconds, 5e-3 + 4e-5 * tokens + 3e-3 * kinds, rtol=1e-9)
    assert drafting.measured_cost() is None
    drafting.learn_costs(passes)
    at = np.array([1, 9, 40, 200])
    np.testing.assert_allclose(drafting.measured_cost(False).seconds(at), 5e-3 + 4e-5 * at, rtol=1e-3)
    np.testing.assert_allclose(drafting.measured_cost(True).seconds(at[1:]), 8e-3 + 4e-5 * at[1:], rtol=1e-3)
    # What is sampled next is what an engine samples that has measured nothing.
    prompts = random_prompts(np.random.default_rng(1), [3, 5, 4])
    requests = [GenerationRequest(i, prompt, 9, i) for i, prompt in enumerate(prompts)]
    other = InProcessEngine(make_model(3, torch.float32))
    engine.start(NEVER, 0)
    other.start(NEVER, 0)
    for want, got in zip(generate(engine, requests), generate(other, requests), strict=True):
        assert want.token_ids.tolist() == got.token_ids.tolist()


def costs_of_a_run(rank: int, flags: str) -> tuple[bool, ForwardCost, ForwardCost]:
    """Whether costs were known before the first collection, and those that it went by."""
    from megatron_dta.common.console import Console
    from megatron_dta.training.arguments import parse_arguments
    from megatron_dta.wiring.setup import build_trainer

    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    trainer = build_trainer(parse_arguments(flags.split()), Console(quiet=True))
    drafting = trainer.source._drafting
    is_known = drafting.measured_cost(False) is not None and drafting.measured_cost(True) is not None
    try:
        trainer.run()
    finally:
        trainer.metrics.close()
    gate = drafting.speculator.gate
    return is_known, gate.plain_cost, gate.drafted_cost


@pytest.mark.parametrize("parallel", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_a_run_begins_with_costs_that_all_ranks_share(parallel: str, tmp_path: Path) -> None:
    ranks = run_on_ranks(costs_of_a_run, f"{FLAGS} {parallel}", 2, tmp_path / "ranks")
    for is_known, plain, drafted in ranks:
        assert is_known
        assert (plain, drafted) == ranks[0][1:]
        assert ForwardCost() not in (plain, drafted)
