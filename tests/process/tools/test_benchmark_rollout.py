"""The rollout benchmark: decoding, trees of simulated lengths, and speculation on recorded samples."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import numpy as np
import pytest

from common import forced_engine
from common.forced_engine import ForcedEngine, KnownDrafting, WaveTime
from common.simulated_lengths import LengthDistribution
from conftest import seed_all
from forked import run_python, run_ranks
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, generate
from rollout import first_timed_token
from rollout_forest import NEVER
from rollout_parts.drafting import doubts
from rollout_parts.rounding import distance, run_noise
from sampling_cases import VOCAB, make_model, random_prompts
from speculation_exact_cases import suffix_drafting


def run(*arguments: str) -> CompletedProcess:
    return run_python(["benchmarks/rollout.py", *arguments])


def write_repetitive(path: Path, generator: np.random.Generator, turns: int = 1) -> int:
    """Four samples of each of three prompts, the same but for two tokens; returns the most tokens of one."""
    rollouts, longest = [], 0
    for problem in range(3):
        prompt, base = generator.integers(0, 4096, 9), generator.integers(0, 4096, 40)
        for _ in range(4):
            generated = base[: generator.integers(12, 40)].copy()
            generated[generator.integers(0, len(generated), 2)] = generator.integers(0, 4096, 2)
            ids = np.concatenate([prompt, generated]).astype(np.int32)
            mask = np.arange(len(ids)) >= 9
            if turns > 1:
                mask[14] = False
            rollouts.append(Rollout(ids, mask, reward=0.0, group_id=str(problem)))
            longest = max(longest, len(generated))
    write_rollouts(path, rollouts)
    return longest


@pytest.mark.parametrize("drafts", [False, True])
def test_a_forced_engine_gives_the_record(drafts: bool):
    generator = seed_all(3)
    model = make_model(3)
    recorded = {i: generator.integers(0, VOCAB, 30).astype(np.int32) for i in range(5)}
    recorded[4] = recorded[0]
    prompts = random_prompts(generator, [3, 8, 5, 4, 3])
    engine = ForcedEngine(recorded, model)
    for step in range(3):
        engine.draft_with(suffix_drafting(budget="always") if drafts and step else None)
        engine.start(NEVER, step)
        results = generate(engine, [GenerationRequest(i, p, 30 - i, i) for i, p in enumerate(prompts)])
        assert all(np.array_equal(r.token_ids, recorded[i][: 30 - i]) for i, r in enumerate(results))
    assert (engine.statistics()["drafted_tokens"] > 0) == drafts


@pytest.mark.parametrize(("drafts", "max_tokens"), [(False, 64), (False, 4), (True, 64)])
def test_time_goes_to_the_prompts_or_to_the_passes_behind_them(monkeypatch, drafts: bool, max_tokens: int):
    """On a clock that only the passes move: those that still bring a first token take 100 s, the others 1 s."""
    generator = seed_all(4)
    recorded = {i: generator.integers(0, VOCAB, 12).astype(np.int32) for i in range(6)}
    prompt, *others = random_prompts(generator, [9, 7, 8])
    prompts = [prompt, prompt, prompt, prompt, *others]
    engine = ForcedEngine(recorded, make_model(3), EngineSettings(max_tokens=max_tokens))
    clock, first_tokens, passes = [0.0], set(), engine._passes
    monkeypatch.setattr(forced_engine, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def slow(*arguments):
        waiting = engine._scheduler.waiting or any(s.num_tokens == s.context_length for s in engine._scheduler.running)
        clock[0] += 100.0 if waiting else 1.0
        first_tokens.add(clock[0])
        return passes(*arguments)

    monkeypatch.setattr(engine, "_passes", slow)
    for step in range(2):
        engine.draft_with(suffix_drafting(budget="always") if drafts else None)
        engine.start(NEVER, step)
        first_tokens.clear()
        results, time = engine.timed([GenerationRequest(i, p, 12, i) for i, p in enumerate(prompts)])
        assert all(np.array_equal(result.token_ids, recorded[i]) for i, result in enumerate(results))
        assert time.forwards == len(first_tokens)
        assert time.prompt_forwards < time.forwards
        assert time.prompt_seconds == 100 * time.prompt_forwards
        assert time.seconds - time.prompt_seconds == time.forwards - time.prompt_forwards
        assert time.pass_seconds == 1
        # The four samples of one prompt compute it once: 24 tokens in all.
        assert time.prompt_forwards == 2 if max_tokens == 64 else time.prompt_forwards >= 6
        assert time.captures == 0
        total = time + time
        assert (total.seconds, total.forwards, total.pass_seconds) == (2 * time.seconds, 2 * time.forwards, 1)


def test_what_cannot_be_is_said():
    right, quick = WaveTime(10.0, 1.0, 100, 10, 0), WaveTime(1.0, 0.9, 100, 10, 0)
    assert doubts({"plain": right, "das": WaveTime(1.0, 1.0, 1, 1, 0)}, 0.05) == []
    (words,) = doubts({"plain": right, "das": quick}, 0.05)
    assert words.startswith("das: a pass of 1.11 ms is shorter than the 50 ms")
    assert "3 graphs were captured" in doubts({"das": WaveTime(10.0, 1.0, 100, 10, 3)}, 0.05)[0]


def test_das_reports_makespans_that_fit_together(tmp_path: Path):
    rollouts = tmp_path / "rollouts.jsonl"
    write_repetitive(rollouts, seed_all(1))
    flags = "--past 2 --batch 4 --runs 1 --waves 2 --memory-bandwidth-gbs 1000 --das-budget always --control --json "
    flags += "--burst 2"
    result = run("das", "--rollouts", str(rollouts), *flags.split())
    assert result.returncode == 0, result.stderr
    row, control = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert (row["case"], control["case"]) == ("recorded", "control")
    for name in ("samples", "longest", "plain_seconds", "plain_forwards", "plain_cost", "cost"):
        assert control[name] == row[name]
    assert control["tokens_per_forward"] < row["tokens_per_forward"]
    assert row["samples"] == 6
    assert row["waves"] == 2
    assert row["saved"] == pytest.approx(1 - row["das_seconds"] / row["plain_seconds"])
    assert row["predicted_saved"] == pytest.approx(1 - row["predicted_das_seconds"] / row["predicted_plain_seconds"])
    for name in ("plain", "das"):
        assert 0 < row[f"{name}_prompt_seconds"] < row[f"{name}_seconds"]
        assert row[f"{name}_prompt_seconds"] < row[f"predicted_{name}_seconds"]
        assert row[f"{name}_pass_ms"] > row["least_pass_ms"] > 0
    assert row["doubts"] == []
    assert row["das_forwards"] < row["plain_forwards"]
    assert row["accepted_tokens"] > 20
    # The first token of a sample comes with its prompt, which the replay does not know of.
    assert row["tokens_per_forward"] == pytest.approx(row["predicted_tokens_per_forward"], rel=0.15)


def test_noise_is_none_for_the_same_run_again():
    flags = "--batch 4 --response-tokens 12 --prompt-tokens 9 --memory-bandwidth-gbs 10 --json"
    result = run("das-noise", *flags.split())
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    ways = [("the same again", 4, 4), ("another batch size", 2, 2), ("another batch size", 32, 32), ("drafts", 4, 32)]
    expected = [(temperature, *way) for temperature in (0.1, 1.0) for way in ways]
    assert [(row["temperature"], row["run"], row["batch"], row["padded_rows"]) for row in rows] == expected
    for row in rows:
        way = row["run"]
        assert row["compared_tokens"] == 48
        # float32: rounding is there, and far too small for a flip in so few tokens.
        assert row["kl"] < 1e-8
        if way == "the same again":
            assert row["kl"] == row["flips_per_thousand"] == row["mean_logprob_difference"] == 0


@pytest.mark.parametrize("drafts", [False, True])
def test_flips_are_counted_behind_equal_contexts(drafts: bool):
    """A record that the model would not have drawn: each of its own draws is that of a run which begins with the
    record up to there, also behind tokens that differ."""
    generator = seed_all(5)
    model = make_model(3)
    recorded = {i: generator.integers(0, VOCAB, 10).astype(np.int32) for i in range(3)}
    prompts = random_prompts(generator, [3, 6, 4])
    drafting = KnownDrafting(recorded, 4, VOCAB, 1) if drafts else None
    engine = ForcedEngine(recorded, model, drafting=drafting)
    engine.start(NEVER, 0)
    forced = generate(engine, [GenerationRequest(i, p, 10, i) for i, p in enumerate(prompts)])
    flips = 0
    for i, prompt in enumerate(prompts):
        for done in range(10):
            plain = InProcessEngine(model)
            plain.start(NEVER, 0)
            context = np.concatenate([prompt, recorded[i][:done]])
            (result,) = generate(plain, [GenerationRequest(0, context, 1, i)])
            assert engine.own[i][0][done] == result.token_ids[0]
            assert engine.own[i][1][done] == pytest.approx(float(result.logprobs[0]), abs=1e-5)
            flips += int(result.token_ids[0] != recorded[i][done])
    found = distance(forced, engine.own)
    first = [next((j for j in range(10) if engine.own[i][0][j] != recorded[i][j]), None) for i in range(3)]
    parted = sum(j is not None for j in first)
    assert found["parted"] == parted
    assert found["until_parted"] == pytest.approx(1e3 * parted / sum(10 if j is None else j + 1 for j in first))
    assert found["compared_tokens"] == 30
    assert found["flips_per_thousand"] == pytest.approx(1e3 * flips / 30)
    assert flips > 15


def test_what_cannot_be_measured_is_refused(tmp_path: Path):
    rollouts = tmp_path / "turns.jsonl"
    write_repetitive(rollouts, seed_all(2), turns=2)
    for flags, words in (
        ("--batch 4", "several turns"),
        ("--batch 4 --live-batch 5", "--live-batch must be from 1 to --batch 4"),
    ):
        result = run("das", "--rollouts", str(rollouts), "--memory-bandwidth-gbs", "10", *flags.split())
        assert result.returncode == 2
        assert words in result.stderr
        assert "Traceback" not in result.stderr
    flags = Namespace(batch=64, other_batch=[12, 50], prompt_tokens=1, response_tokens=1, draft_tokens=1, block_size=1)
    flags = Namespace(**vars(flags), max_tokens=1, burst=1, max_position_embeddings=1, runs=1)
    with pytest.raises(
        InputError, match=r"--other-batch 50 must be .* of another size than --batch 64: both run as 64"
    ):
        run_noise(flags, None)


def test_decode_reports_rates_that_fit_together(tmp_path: Path):
    output = tmp_path / "rollout.json"
    flags = f"--batch 3 --requests 7 --samples-per-prompt 2 --prompt-tokens 37 --response-tokens 10 --output {output}"
    result = run(
        "decode", *flags.split(), "--max-tokens", "16", "--runs", "1", "--memory-bandwidth-gbs", "10", "--json"
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert json.loads(output.read_text()) == report
    (row,) = report["rows"]
    settings = report["settings"]
    assert settings["bandwidth_gbs"] == pytest.approx(10)
    assert settings["bandwidth_from"] == "given"
    # Two prompts of 37 tokens at once, and on average half of the three responses.
    token_bytes = 2 * 4 * 4 * 32 * 4
    cached = 2 * 37 + 3 * 10 / 2
    bound = (settings["weight_gib"] * 2**30 + cached * token_bytes) / 10e9
    seconds = row["decode_pass_ms"] / 1e3
    assert row["share_of_memory_bound"] == pytest.approx(bound / seconds, rel=1e-6)
    assert row["decode_tokens_per_second"] == pytest.approx(3 / seconds, rel=1e-6)
    assert row["requests"] == 7
    assert row["cache_gib"] > 0
    # 7 x 11 tokens of at most three rows, and before the first of them a prompt in chunks of at most 16 tokens.
    assert 26 + 2 <= row["forwards"] <= 26 + 4 * 3 + 7


@pytest.mark.parametrize(("rows", "response", "begin"), [(64, 128, 9), (256, 128, 17), (8, 255, 8), (64, 10, 1)])
def test_what_decode_times_is_whole_bursts_without_prompts(rows: int, response: int, begin: int):
    """Prompts of 128 tokens in passes of 4096, which also decode the rows before them, and bursts of 8 passes."""
    flags = Namespace(
        batch=rows, samples_per_prompt=1, response_tokens=response, prompt_tokens=128, max_tokens=4096, burst=8
    )
    assert first_timed_token(flags, rows) == begin


def test_decode_on_stages_reports_what_the_longest_stage_allows():
    flags = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tL --batch 3 --prompt-tokens 9"
    flags += " --response-tokens 6 --runs 1 --memory-bandwidth-gbs 10 --json"
    first, second = run_ranks(["benchmarks/rollout.py", "decode", *flags.split()], 2)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "decode_pass_ms" not in second.stdout
    report = json.loads(first.stdout.splitlines()[-1])
    (row,), settings = report["rows"], report["settings"]
    assert settings["weight_gib"] == settings["weight_gib_of_ranks"][0]
    # Two groups read the weights; three prompts of 9 tokens, and half of the responses.
    cached = 3 * (9 + 6 / 2)
    stages = zip(settings["weight_gib_of_ranks"], (3, 1), strict=True)
    bound = max(2 * gib * 2**30 + cached * 2 * layers * 4 * 32 * 4 for gib, layers in stages) / 10e9
    assert row["bound_pass_ms"] == pytest.approx(1e3 * bound, rel=1e-6)
    assert row["share_of_memory_bound"] == pytest.approx(1e3 * bound / row["decode_pass_ms"], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode", "--pipeline-model-parallel-size", "0"], "--pipeline-model-parallel-size must be at least 1"),
        (["decode", "--batch", "0"], "--batch must be at least 1"),
        (["decode", "--prompt-tokens", "9000"], "--max-position-embeddings 8192 is less than"),
        (["decode", "--output", "no/such/folder/file.json"], "its folder does not exist"),
    ],
)
def test_decode_refuses_what_cannot_be_measured(arguments: list[str], words: str):
    result = run(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("longer_than", [0, 1, 40, 300])
def test_lengths_are_lognormal_given_that_they_are_longer(longer_than: int):
    """Against drawing from the whole distribution and throwing away what is too short."""
    rng = np.random.default_rng(longer_than)
    mean, sigma = 100.0, 0.7
    lengths = LengthDistribution(mean, sigma)
    drawn = np.array([lengths.draw(u, longer_than) for u in rng.random(4000)])
    whole = np.ceil(np.exp(np.log(mean) - sigma**2 / 2 + sigma * rng.standard_normal(400_000)))
    kept = whole[whole > longer_than]
    assert drawn.min() > longer_than
    for level in (0.1, 0.5, 0.9):
        quantile = np.quantile(kept, level)
        share = (drawn <= quantile).mean()
        assert abs(share - (kept <= quantile).mean()) < 4 * 0.5 / np.sqrt(4000)
    assert lengths.draw(0.0, longer_than) > longer_than
    assert np.isfinite(lengths.draw(1 - 2.0**-53, 10**6))


def test_trees_decode_at_most_078_of_what_independent_rollouts_do():
    """w = 16, N = 2, segments of 512, mean length 1.5k, cap 7k."""
    flags = "--queries 1500 --seed 3 --width 16 --branching-factor 2 --segment-length 512 --mean-length 1500"
    result = run("tree-tokens", *flags.split(), "--max-length", "7168", "--json")
    row = json.loads(result.stdout.strip().splitlines()[-1])["rows"][0]
    assert row["decoded_tokens_ratio"] <= 0.78
    assert row["leaves"] == 1500 * 16
    assert abs(row["mean_length"] - 1500) < 100
    # Plain leaves are too long, weighted ones are not.
    assert row["mean_leaf_length"] > 1.3 * row["mean_length"]
    assert abs(row["weighted_leaf_length"] - row["mean_length"]) < 0.03 * row["mean_length"]
