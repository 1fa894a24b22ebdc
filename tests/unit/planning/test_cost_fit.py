"""Fitting the cost model: coefficients come back from synthetic timings, bytes never fall short, files are checked."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.file import CostFile, CostShape, PassSeconds, load_cost_file, load_cost_model
from megatron_dta.planning.costs.fit import (
    MeasuredOp,
    fit_bytes,
    fit_errors,
    fit_seconds,
    nonnegative_least_squares,
    predicted,
)
from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.costs.refit import refit
from megatron_dta.planning.costs.segment_bytes import SegmentBytes

SHAPE = CostShape(2048, 6144, 16, 8, 128, 151936)
# About those of a GPU.
FORWARD = PassSeconds(2e-7, 2e-11, 1e-7, 1.2e-6, 1e-3, 4e-3)
BACKWARD = PassSeconds(4e-7, 5e-11, 2e-7, 2.5e-6, 2.2e-3, 3e-3)
BYTES = SegmentBytes(50_000.0, 20_000.0, 12_288.0, 4096.0, 90_000.0, 9_000.0, 1.5e9)


def random_ops(rng: np.random.Generator, count: int = 240) -> list[MeasuredOp]:
    ops = []
    for index in range(count):
        tokens = int(rng.choice([256, 512, 1024, 2048, 4096, 8192]))
        above = int(rng.integers(0, 28_000))
        pairs = tokens * above + tokens * (tokens + 1) // 2
        edges = int(tokens * rng.choice([0.0, 0.3, 1.0]))
        kind = ("forward", "backward", "recompute")[index % 3]
        ops.append(MeasuredOp(kind, (7, 28)[index % 2], tokens, above + tokens, pairs, edges, 1.0))
    return ops


def timed(rng: np.random.Generator, ops: list[MeasuredOp], noise: float) -> list[MeasuredOp]:
    seconds = predicted(ops, FORWARD, BACKWARD) * (1 + noise * rng.standard_normal(len(ops)))
    return [replace(op, seconds=float(s)) for op, s in zip(ops, seconds, strict=True)]


@pytest.mark.parametrize(("tokens", "is_long"), [(10, False), (30_000, True)])
def test_predictions_are_those_of_the_file(tokens: int, is_long: bool) -> None:
    op = MeasuredOp("recompute", 3, tokens, tokens + 4, 95, 4, 1.0)
    each = (FORWARD, BACKWARD)
    linear = [3 * (tokens * c.token_and_layer + 95 * c.pair_and_layer) + tokens * c.token + 4 * c.edge for c in each]
    floors = [3 * c.floor_and_layer + c.floor for c in each]
    assert [one > least for one, least in zip(linear, floors, strict=True)] == [is_long, is_long]
    by_hand = sum(linear if is_long else floors)
    assert predicted([op], FORWARD, BACKWARD)[0] == pytest.approx(by_hand)
    parts = [predicted([replace(op, kind=kind)], FORWARD, BACKWARD)[0] for kind in ("forward", "backward")]
    assert sum(parts) == pytest.approx(by_hand)


@pytest.mark.parametrize("seed", range(4))
def test_known_coefficients_come_back(seed: int) -> None:
    rng = seed_all(seed)
    exact = timed(rng, random_ops(rng), 0.0)
    for found, truth in zip(fit_seconds(exact), (FORWARD, BACKWARD), strict=True):
        for field in fields(PassSeconds):
            assert getattr(found, field.name) == pytest.approx(getattr(truth, field.name), rel=1e-4), field.name
    noisy = timed(rng, random_ops(rng, 900), 0.03)
    # Ops that something else on the machine held up.
    for index in rng.choice(len(noisy), 6, replace=False):
        noisy[index] = replace(noisy[index], seconds=3 * noisy[index].seconds)
    forward, backward = fit_seconds(noisy)
    for found, truth in ((forward, FORWARD), (backward, BACKWARD)):
        for name, tolerance in (("token_and_layer", 0.1), ("pair_and_layer", 0.1), ("edge", 0.25)):
            assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=tolerance), name
    fresh = random_ops(rng)
    np.testing.assert_allclose(
        predicted(fresh, forward, backward), predicted(fresh, FORWARD, BACKWARD), rtol=0.06, atol=1e-3
    )
    # What runs its forward again is no part of the fit.
    slow = [replace(op, seconds=op.seconds * (9 if op.kind == "recompute" else 1)) for op in exact]
    assert fit_seconds(slow) == fit_seconds(exact)
    errors = fit_errors(exact, *fit_seconds(exact))
    assert set(errors) == {"forward", "backward", "recompute"}
    assert max(each["largest"] for each in errors.values()) < 1e-4


@pytest.mark.parametrize("seed", range(30))
def test_least_squares_against_all_sets_of_columns(seed: int) -> None:
    rng = seed_all(seed)
    rows, columns = int(rng.integers(3, 20)), int(rng.integers(1, 6))
    matrix = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-6, 6, columns)
    target = rng.standard_normal(rows)
    best = np.linalg.norm(target)
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            x = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(matrix[:, chosen] @ x - target)))
    found = nonnegative_least_squares(matrix, target)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_bytes_never_fall_short(seed: int) -> None:
    rng = seed_all(seed)
    ops = []
    for op in random_ops(rng, 60):
        kept = BYTES.kept(op.layers) * op.tokens * rng.uniform(0.97, 1.0)
        work = BYTES.work(op.tokens, op.path_tokens) * rng.uniform(0.9, 1.0)
        keeps = op.kind == "forward"
        ops.append(
            replace(op, kept_bytes=kept if keeps else None, peak_bytes=work + (kept if op.kind != "backward" else 0.0))
        )
    found = fit_bytes(ops, BYTES)
    most = max(op.kept_bytes or 0 for op in ops)
    assert found.kv_per_token_and_layer == BYTES.kv_per_token_and_layer
    for op in ops:
        own = found.kept(op.layers) * op.tokens
        if op.kept_bytes is not None:
            assert op.kept_bytes <= (own + found.work_fixed) * (1 + 1e-9)
            assert op.kept_bytes <= own * (1 + 1e-9) or op.kept_bytes < most / 16
        below = own if op.kind != "backward" else 0.0
        assert op.peak_bytes <= (below + found.work(op.tokens, op.path_tokens) + found.fixed) * (1 + 1e-9)
    assert found.kept(28) == pytest.approx(BYTES.kept(28), rel=0.06)
    assert found.work(4096, 20_000) == pytest.approx(BYTES.work(4096, 20_000), rel=0.25)
    assert fit_bytes([replace(op, kept_bytes=None, peak_bytes=None) for op in ops], BYTES) is None


def test_the_cost_model_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    given = CostFile(str(path), SHAPE, 28, FORWARD, BACKWARD, BYTES)
    path.write_text(json.dumps(given.as_json() | {"hardware": "any", "measurements": []}))
    assert load_cost_file(path) == given
    model, measured = load_cost_model(path)
    assert measured == given
    assert model == given.model(28, 2048)
    assert model.seconds_per_pair == pytest.approx(28 * 7e-11)
    assert model.seconds_per_token == pytest.approx(28 * 6e-7 + 3e-7)
    assert model.floor_seconds == pytest.approx(28 * 3.2e-3 + 7e-3)
    assert model.floors == pytest.approx((28 * 1e-3 + 4e-3, 28 * 2.2e-3 + 3e-3))
    assert model.forward_edge_share == pytest.approx(1.2 / 3.7)
    for tokens in (100, 5000, 9000):
        counts = tokens, tokens * (tokens + 1) // 2, tokens // 3
        found = model.segment_seconds(*map(np.asarray, counts))
        op = MeasuredOp("forward", 28, tokens, *counts, 1.0)
        np.testing.assert_allclose(found, predicted([op, replace(op, kind="backward")], FORWARD, BACKWARD))
    half = given.model(14, 512)
    assert half.seconds_per_edge == model.seconds_per_edge
    assert half.segment_tokens == 512
    assert half.seconds_per_pair == pytest.approx(model.seconds_per_pair / 2)
    plain = tmp_path / "plain.json"
    plain.write_text('{"seconds_per_token": 1}')
    assert load_cost_model(plain) == (CostModel(seconds_per_token=1), None)


def test_another_model_is_refused() -> None:
    given = CostFile("costs.json", SHAPE, 28, FORWARD, BACKWARD)
    given.check(SHAPE)
    for name, value, shown in (
        ("hidden_size", 4096, "--hidden-size 2048, but the model has 4096"),
        ("dtype", "float32", "dtype bfloat16, but the model has float32"),
        ("tensor_model_parallel_size", 2, "--tensor-model-parallel-size 1"),
    ):
        with pytest.raises(InputError, match=shown) as caught:
            given.check(replace(SHAPE, **{name: value}))
        assert "costs.json" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("", "what", "training step", "not a file of megatron-dta fit-cost-model"),
        ("", "version", 3, "is of version 3, but this program reads up to 2"),
        ("", "version", True, "is of version True"),
        ("", "num_layers", 0, "num_layers must be a whole number above 0"),
        ("", "forward", [], "'forward' must be an object"),
        ("", "bytes", 3, "'bytes' must be an object"),
        ("forward", "token_and_layer", -1.0, "forward.token_and_layer must be a number not below 0"),
        ("forward", "token_and_layer", True, "forward.token_and_layer must be a number not below 0"),
        ("backward", "pair", 1.0, "backward.pair is not known"),
        ("backward", "segment_and_layer", 1.0, "was fitted in an older form; .* megatron-dta fit-cost-model --refit"),
        ("backward", "edge", float("nan"), "backward.edge must be"),
        ("shape", "dtype", 2, "shape.dtype must be a name"),
        ("shape", "sequence_parallel", 1, "shape.sequence_parallel must be true or false"),
        ("shape", "hidden_size", 1.5, "shape.hidden_size must be a whole number"),
        ("shape", "vocab_size", None, "shape.vocab_size must be"),
        ("bytes", "work_fixed", "x", "bytes.work_fixed must be"),
    ],
)
def test_bad_files_get_one_line(tmp_path: Path, part: str, key: str, value: object, message: str) -> None:
    path = tmp_path / "costs.json"
    content = CostFile(str(path), SHAPE, 28, FORWARD, BACKWARD, BYTES).as_json()
    (content[part] if part else content)[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as caught:
        load_cost_file(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_of_version_1_have_fewer_bytes(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    given = CostFile(str(path), SHAPE, 28, FORWARD, BACKWARD, BYTES)
    content = given.as_json()
    assert content["version"] == 2
    for name in ("scores_per_token", "scores_per_pair", "most_scores", "kv_per_token", "fixed"):
        del content["bytes"][name]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"bytes\.scores_per_token is missing"):
        load_cost_file(path)
    del content["version"]
    path.write_text(json.dumps(content))
    assert load_cost_file(path) == given
    assert BYTES.fixed == BYTES.most_scores == 0


def test_files_that_hold_no_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    nothing = {name: 0.0 for name in asdict(FORWARD)}
    content = CostFile(str(path), SHAPE, 28, FORWARD, BACKWARD).as_json() | {"forward": nothing, "backward": nothing}
    for text, message in (
        ("{", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ("[]", "one JSON object"),
        (json.dumps(content), "seconds_per_token of the cost model must be above 0"),
        (json.dumps({"what": "cost model", "num_layers": 2}), "'shape' must be an object"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            load_cost_file(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_cost_file(tmp_path / "none.json")


def test_a_file_is_fitted_again_from_its_measurements(tmp_path: Path) -> None:
    rng = seed_all(1)
    path = tmp_path / "costs.json"
    ops = timed(rng, random_ops(rng), 0.0)
    old = CostFile(str(path), SHAPE, 28, PassSeconds(1.0), PassSeconds(1.0)).as_json()
    old["forward"] = {"token_and_layer": 1.0, "segment_and_layer": 2.0}
    old |= {"commit": "abc", "date": "then", "measurements": [asdict(op) for op in ops]}
    path.write_text(json.dumps(old))
    with pytest.raises(InputError, match="older form"):
        load_cost_file(path)
    new = refit(path, {"date": "now"})
    assert (new["commit"], new["date"], new["refitted"]) == ("abc", "then", {"date": "now"})
    assert new["bytes"] is None
    assert new["measurements"] == old["measurements"]
    path.write_text(json.dumps(new))
    for found, truth in zip(
        (load_cost_file(path).forward, load_cost_file(path).backward), (FORWARD, BACKWARD), strict=True
    ):
        assert asdict(found) == pytest.approx(asdict(truth), rel=1e-4)
    for op in new["measurements"]:
        op["kept_bytes"] = BYTES.kept(op["layers"]) * op["tokens"] if op["kind"] == "forward" else None
        op["peak_bytes"] = 1e12
    path.write_text(json.dumps(new))
    measured = refit(path, {})["bytes"]
    assert measured["kept_per_token"] == pytest.approx(BYTES.kept_per_token, rel=1e-3)
    assert measured["input_per_token"] == 2 * SHAPE.hidden_size
    assert measured["kv_per_token_and_layer"] == 2 * 8 * 128 * (2 + 4)

    def message(measurements: object) -> str:
        path.write_text(json.dumps(old | {"measurements": measurements}))
        with pytest.raises(InputError) as caught:
            refit(path, {})
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    first = asdict(ops[0])
    assert "no measurements" in message(None)
    assert "'measurements' must be an object (measurement 0)" in message([3])
    assert "measurements.tokens must be a whole number" in message([first | {"tokens": 0.5}])
    assert "measurements.pairs is missing" in message([{k: v for k, v in first.items() if k != "pairs"}])
    assert "measurement 1 is not a forward" in message([first, first | {"kind": "sideways"}])
    assert "that took time" in message([first | {"seconds": 0}])
    assert "no forwards of two depths" in message([first])


@pytest.mark.parametrize("seed", range(3))
def test_the_measured_cases_tell_coefficients_apart(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a device that pauses between ops is 8% faster, and for segments of many short sequences."""
    from megatron_dta.commands.fit_cost_model import CASES

    rng, ops = seed_all(seed), []
    for layers, case in itertools.product((7, 28), CASES):
        path = 0
        for tokens in (1 << 15 >> cut for cut in case.cuts):
            path = path + tokens if case.sequences is None else tokens
            pairs = tokens * path - tokens * (tokens - 1) // 2
            if case.sequences is not None:
                each = 1 << 15 >> case.sequences
                pairs = tokens // each * (each * (each + 1) // 2)
            for kind, truth in (("forward", FORWARD), ("backward", BACKWARD)):
                op = MeasuredOp(kind, layers, tokens, path, pairs, int(case.trained * tokens), 1.0)
                floor = truth.floor_and_layer * layers + truth.floor
                seconds = predicted([op], FORWARD, BACKWARD)[0]
                clock = 0.92 if case.paused and seconds > floor else 1.0
                ops.append(replace(op, seconds=max(floor, clock * seconds) * rng.uniform(0.97, 1.03)))
    found = fit_seconds(ops)
    for tokens, pairs, edges in ((8192, 900_000, 8192), (8192, 33_000_000, 900), (6000, 130_000_000, 2000)):
        both = [MeasuredOp(kind, 28, tokens, tokens, pairs, edges, 1.0) for kind in ("forward", "backward")]
        assert predicted(both, *found).sum() == pytest.approx(predicted(both, FORWARD, BACKWARD).sum(), rel=0.04)
