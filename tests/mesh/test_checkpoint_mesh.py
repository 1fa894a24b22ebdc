"""Checkpoints of several ranks, also with experts: loaded on any mesh, all or nothing, written while training."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_mesh_cases import EXPERTS, ONE, TP2, assert_same_tensors, in_bf16, stretches, tensors_of
from checkpoint_worker import MODEL, Stretch, fail_on_a_rank, poison_one_rank, run_stretches, save_in_background
from megatron_dta.core.config import ParallelConfig
from megatron_dta.training.checkpoint.files import find_checkpoint, prune_checkpoints
from mesh_worker import run_on_ranks

EP2 = ParallelConfig(expert_model_parallel_size=2)
LAYER, OF_EXPERTS = (replace(model, num_layers=1) for model in (MODEL, EXPERTS))
CASES = {"fp32": (LAYER, False), "bf16 sharded": (in_bf16(LAYER), True)}
WITH_EXPERTS = {"fp32 sharded": (OF_EXPERTS, True), "bf16": (in_bf16(OF_EXPERTS), False)}
# The meshes that the cases begin on and move from.
MESHES = {"fp32": ("tp2",), "bf16 sharded": ("tp2", "dp2")}
MOVED = {"tp2": "dp2", "dp2": "tp2"}
STARTED = [(case, f"{mesh}-4") for case, meshes in MESHES.items() for mesh in meshes]
CONTINUED = [
    (case, name)
    for case, meshes in MESHES.items()
    for mesh in meshes
    for name in (f"{mesh}-{MOVED[mesh]}", f"{mesh}-one")
] + [("fp32", "tp2-6")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """For every case: two steps in one process, then four more in pairs, on this mesh or on another one each time."""
    folder = tmp_path_factory.mktemp("runs")
    # One process first: the other meshes start from its weights, as their vocabularies are padded differently.
    run_on_ranks(run_stretches, stretches(folder, CASES, (ONE, "one", None)), 1, folder / "a")
    parallel = {"tp2": TP2, "dp2": ONE}
    pairs, alone = [], []
    for case, meshes in MESHES.items():
        one_case = {case: CASES[case]}
        alone += stretches(folder, one_case, (ONE, "one-4", "one"), (ONE, "one-6", "one-4"))
        for mesh in meshes:
            here, moved = parallel[mesh], parallel[MOVED[mesh]]
            legs = ((here, "4", "one"), (here, "6", f"{mesh}-4"), (moved, MOVED[mesh], f"{mesh}-4"))
            wanted = [leg for leg in legs if leg[1] != "6" or case == "fp32"]
            pairs += stretches(folder, one_case, *((on, f"{mesh}-{name}", load) for on, name, load in wanted))
            alone += stretches(folder, one_case, (ONE, f"{mesh}-one", f"{mesh}-4"))
    results = {"two": run_on_ranks(run_stretches, pairs, 2, folder / "b")}
    results["one"] = run_on_ranks(run_stretches, alone, 1, folder / "c")
    return folder, results


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every case: two steps on one process, then two on divided experts, then two on another division."""
    folder = tmp_path_factory.mktemp("experts")
    first = stretches(folder, WITH_EXPERTS, (ONE, "one", None), (ONE, "one-4", "one"))
    run_on_ranks(run_stretches, first, 1, folder / "a")
    legs = ((EP2, "ep2-4", "one"), (ONE, "ep2-dp2", "ep2-4"))
    run_on_ranks(run_stretches, stretches(folder, WITH_EXPERTS, *legs), 2, folder / "b")
    alone = stretches(folder, WITH_EXPERTS, (ONE, "one-6", "one-4"), (ONE, "ep2-one", "ep2-4"))
    run_on_ranks(run_stretches, alone, 1, folder / "c")
    return folder


@pytest.mark.parametrize("case", WITH_EXPERTS)
@pytest.mark.parametrize(("actual", "expected"), [("ep2-4", "one-4"), ("ep2-dp2", "one-6"), ("ep2-one", "one-6")])
def test_every_division_of_the_experts_goes_on_alike(experts: Path, case: str, actual: str, expected: str) -> None:
    assert_same_tensors(experts / case / actual, experts / case / expected)


@pytest.mark.parametrize(("case", "name"), STARTED)
def test_one_process_continues_on_two(runs: tuple[Path, dict], case: str, name: str) -> None:
    assert_same_tensors(runs[0] / case / name, runs[0] / case / "one-4")


@pytest.mark.parametrize(("case", "name"), CONTINUED)
def test_every_mesh_continues_every_other(runs: tuple[Path, dict], case: str, name: str) -> None:
    assert_same_tensors(runs[0] / case / name, runs[0] / case / "one-6")


def test_another_mesh_is_told(runs: tuple[Path, dict]) -> None:
    one, tp2, dp2 = "TP 1 PP 1 DP 1", "TP 2 PP 1 DP 1", "TP 1 PP 1 DP 2"
    for results in runs[1]["two"]:
        notes = [[line for line in result["changed"] if line.startswith("mesh: ")] for result in results]
        assert notes[1] == []
        # The last one has as many processes as before.
        for (line,), before, now in ((notes[0], one, tp2), (notes[2], tp2, dp2)):
            assert line.startswith(f"mesh: saved with {before}, continued with {now}; random states start from")


def test_random_states_of_ranks(tmp_path: Path) -> None:
    """Each rank's own continue; the same seed alone does not give them."""
    first = Stretch(ONE, 1, tmp_path / "first", seed=3)
    again = Stretch(ONE, 1, tmp_path / "again", load=tmp_path / "first", seed=99)
    results = run_on_ranks(run_stretches, [first, again], 2, tmp_path / "run")
    for before, after in results:
        assert before["drawn"] == after["drawn"]
    assert results[0][0]["drawn"][1:] != results[1][0]["drawn"][1:]


def test_a_failed_write_fails_on_all_ranks(tmp_path: Path) -> None:
    parallel = replace(ONE, use_distributed_optimizer=True)
    results = run_on_ranks(fail_on_a_rank, Stretch(parallel, 1, tmp_path / "save"), 2, tmp_path / "run")
    for messages in results:
        assert len(messages) == 12
        for message, tracker, exists in zip(*[iter(messages)] * 3, strict=True):
            assert "iter_0000002: the checkpoint cannot be written" in message
            assert "\n" not in message
            assert (tracker, exists) == ("1", "False")
    assert find_checkpoint(tmp_path / "save").name == "iter_0000003"


def test_background_writing(tmp_path: Path) -> None:
    stretch = Stretch(ONE, 1, tmp_path / "save")
    (tmp_path / "save").mkdir()
    results = run_on_ranks(save_in_background, stretch, 2, tmp_path / "run")
    for rank, seen in enumerate(results):
        first = f"saved {tmp_path}/save/iter_0000001"
        assert seen["held"] == (False, ["iter_0000001.tmp"], []), rank
        assert seen["one rank done"] == (False, []), rank
        assert seen["finished"] == ("1", [first]), rank
        assert seen["all"] == ("4", ["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]), rank


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    stretch = Stretch(TP2, 1, tmp_path / "save")
    for applied in run_on_ranks(poison_one_rank, stretch, 2, tmp_path / "run"):
        assert applied == [True, False, True, False, True]
    assert all(values.isfinite().all() for values in tensors_of(tmp_path / "save").values())


@pytest.mark.parametrize(
    ("keep", "tracker", "left"), [(2, 40, [30, 40]), (9, 40, [10, 20, 30, 40]), (1, 20, [20, 30, 40])]
)
def test_pruning(tmp_path: Path, keep: int, tracker: int, left: list[int]) -> None:
    for number in (10, 20, 30, 40):
        path = tmp_path / f"iter_{number:07d}"
        path.mkdir()
        (path / "metadata.json").write_text("{}")
    (tmp_path / "reference").mkdir()
    (tmp_path / "iter_notes").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(tracker))
    prune_checkpoints(tmp_path, keep)
    assert sorted(path.name for path in tmp_path.glob("iter_0*")) == [f"iter_{number:07d}" for number in left]
    assert (tmp_path / "reference").exists()
    assert (tmp_path / "iter_notes").exists()
    assert not list(tmp_path.glob("*.tmp"))
