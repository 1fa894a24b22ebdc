"""The rollout benchmark's decode part: a run of a few tokens, whose report must fit what was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_rollout_cases import run


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode", "--batch", "0"], "--batch must be at least 1"),
        (["decode", "--prompt-tokens", "9000"], "--max-position-embeddings 8192 is less than"),
        (["decode", "--output", "no/such/folder/file.json"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], words: str):
    result = run(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
