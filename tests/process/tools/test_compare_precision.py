"""Distances between steps in different precisions, and the script that reports them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from common.precision_report import report_precision
from conftest import REPOSITORY, seed_all
from megatron_dta.extras.parity import Outcome


@pytest.fixture(scope="module")
def tool():
    import compare_precision

    return compare_precision


def outcome(generator: np.random.Generator, scale: float = 1.0) -> Outcome:
    draw = lambda *shape: torch.from_numpy(generator.normal(size=shape)) * scale  # noqa: E731
    logprobs = [generator.normal(size=length).astype(np.float32) for length in (5, 1, 13)]
    return Outcome(float(generator.normal()), logprobs, {"a": draw(7, 3), "b": draw(11), "c": torch.zeros(2)})


def test_distances_are_those_of_the_definitions() -> None:
    generator = seed_all(1)
    new, old = outcome(generator, 3.0), outcome(generator)
    masks = [generator.random(len(values)) < 0.6 for values in old.logprobs]
    masks[0][0] = True
    report = report_precision(new, old, masks)
    pairs = [
        (float(a), float(b))
        for x, y, m in zip(new.logprobs, old.logprobs, masks, strict=True)
        for a, b, kept in zip(x, y, m, strict=True)
        if kept
    ]
    d = np.array([a - b for a, b in pairs])
    assert report.logprobs.tokens == len(pairs)
    assert report.logprobs.kl_k1 == pytest.approx(-d.mean()) == pytest.approx(-report.logprobs.mean)
    assert report.logprobs.kl_k3 == pytest.approx(np.mean(np.exp(d) - 1 - d))
    assert (report.logprobs.mean_absolute, report.logprobs.largest) == pytest.approx((abs(d).mean(), abs(d).max()))
    assert report.logprobs.percentile_99 == pytest.approx(np.percentile(abs(d), 99))
    for name, gradient in old.gradients.items():
        a, b = new.gradients[name].flatten(), gradient.flatten()
        parameter = report.parameters[name]
        if name == "c":
            assert (parameter.cosine, parameter.distance, parameter.norm_ratio) == (1.0, 0.0, 1.0)
            continue
        assert parameter.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(a, b, 0)))
        assert parameter.distance == pytest.approx(float((a - b).norm() / b.norm()))
        assert parameter.norm_ratio == pytest.approx(float(a.norm() / b.norm()))
    a, b = (torch.cat([x.flatten() for x in side.gradients.values()]) for side in (new, old))
    assert report.gradient.distance == pytest.approx(float((a - b).norm() / b.norm()))
    assert report.lowest_cosines(1)[0][0] == min(report.parameters, key=lambda name: report.parameters[name].cosine)


def test_a_nan_a_lost_gradient_and_a_missing_one_show() -> None:
    old = outcome(seed_all(4))
    masks = [np.ones(len(values), bool) for values in old.logprobs]
    broken = {name: values.clone() for name, values in old.gradients.items()}
    broken["b"][3] = float("nan")
    report = report_precision(Outcome(0.0, old.logprobs, broken), old, masks)
    assert report.lowest_cosines(1)[0][0] == "b"
    assert np.isnan(report.gradient.cosine)
    lost = old.gradients | {"b": torch.zeros(11)}
    assert report_precision(Outcome(0.0, old.logprobs, lost), old, masks).parameters["b"].cosine == 0.0
    del lost["a"]
    with pytest.raises(ValueError, match="only one side has a gradient of a"):
        report_precision(Outcome(0.0, old.logprobs, lost), old, masks)


def run(tool, monkeypatch: pytest.MonkeyPatch, capsys, *arguments: object) -> dict:
    monkeypatch.setattr(sys, "argv", ["compare_precision.py", *map(str, arguments), "--json"])
    assert tool.main() == 0
    told = capsys.readouterr()
    assert "next: bf16 local" in told.err
    return json.loads(told.out.strip().splitlines()[-1])


def test_bfloat16_beside_float32(tool, monkeypatch, capsys, tmp_path: Path) -> None:
    file, small = REPOSITORY / "examples" / "rollouts.example.jsonl", ("--max-sequences", 5, "--tree-segment-tokens", 8)
    printed = run(tool, monkeypatch, capsys, file, *small, "--reference", "fp32", "--output", tmp_path / "all.json")
    (row,) = printed["candidates"]
    assert (printed["reference"], row["candidate"]) == ("fp32 local", "bf16 local")
    assert 1e-5 < row["logprobs"]["mean_absolute"] < 1e-2
    assert 0 < row["logprobs"]["kl_k3"] < 1e-4
    assert 0.999 < row["gradient"]["cosine"] < 1.0
    assert "parameters" not in row
    assert len(row["lowest_cosines"]) == 5
    written = json.loads((tmp_path / "all.json").read_text())
    (candidate,) = written["candidates"]
    assert candidate["gradient"] == row["gradient"]
    assert row["lowest_cosines"][0]["parameter"] in candidate["parameters"]
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"]
