"""The trainer on pipeline stages: same rollouts, metrics and checkpoints as in one process."""

from itertools import pairwise
from pathlib import Path

import pytest

from megatron_dta.core.planning.pipeline.timeline import WORK_KINDS
from megatron_dta.training.monitor.timeline_files import read_timelines
from mesh_trainer_cases import SAMPLED as ONE_LAYER
from mesh_trainer_cases import SHAPE, SHARDED, _compare, train_on_rank, write_stored
from mesh_worker import run_on_ranks
from resume_cases import rows_without_timing

LAYERS = SHAPE.replace("--num-layers 2", "--num-layers 4")
STORED = f"{LAYERS} --global-batch-size 8 --train-iters 3 --tree-segment-tokens 18"
SAMPLED = f"{ONE_LAYER.replace('--num-layers 1', '--num-layers 2')} --make-vocab-size-divisible-by 2"
PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds what runs on one, two and four processes have left behind; all start from the same weights."""
    path = tmp_path_factory.mktemp("runs")
    stored = f"{STORED} {write_stored(path)} --make-vocab-size-divisible-by 2"

    def start(name: str, base: str) -> tuple[str, str | None]:
        return f"{base.replace('--train-iters 3', '--train-iters 1')} --save {path}/{name}-start", None

    def job(name: str, base: str, flags: str = "", terminated: str | None = None) -> tuple[str, str | None]:
        weights = f"{path}/{name.split('-')[0]}-start --finetune"
        return f"{base} {flags} --load {weights} --save {path}/{name}", terminated

    alone = [start("stored", stored), start("sampled", SAMPLED), job("stored-1", stored), job("sampled-1", SAMPLED)]
    half = stored.replace("--train-iters 3", "--train-iters 2")
    twos = [
        job("stored-moved", half, f"{VPP} --timeline-dir {path}/timelines"),
        job("sampled-pp2", SAMPLED, PP),
        job("sampled-pp2-cut", SAMPLED, f"{PP} --save-interval 1", "1"),
        job("sampled-pp2-cut", SAMPLED, f"{PP} --save-interval 1"),
    ]
    arrives = [(f"{stored} --save {path}/stored-moved", None)]
    fours = [job("sampled-pp2-dp2", SAMPLED, f"{PP} {SHARDED} --pipeline-model-parallel-layout E|ttL")]
    for name, jobs, world_size in (("one", alone, 1), ("two", twos, 2), ("arrive", arrives, 1), ("four", fours, 4)):
        run_on_ranks(train_on_rank, jobs, world_size, path / f"ranks-{name}")
    return path


def test_a_checkpoint_of_virtual_stages_goes_on_in_one_process(folder):
    _compare(rows_without_timing(folder / "stored-moved"), rows_without_timing(folder / "stored-1"))


@pytest.mark.parametrize("run", ["sampled-pp2", "sampled-pp2-dp2"])
def test_samples_are_those_of_one_process(folder, run):
    rows, expected = rows_without_timing(folder / run), rows_without_timing(folder / "sampled-1")
    _compare(rows, expected)
    assert [row.get("reward") for row in rows[:3]] == [row.get("reward") for row in expected[:3]]


def test_a_run_goes_on_bit_for_bit_on_the_same_stages(folder):
    assert rows_without_timing(folder / "sampled-pp2-cut") == rows_without_timing(folder / "sampled-pp2")


def test_a_steps_timeline_is_written_beside_its_plan(folder):
    """The same ops on the same stages, in the same order on each; a stage does one thing at a time."""
    (path,) = (folder / "timelines").iterdir()
    assert path.name == "step_2.json"
    timelines = read_timelines(path)
    measured, planned = timelines["measured"], timelines["planned"]
    assert {event.kind for event in measured} == {"F", "B", "wait"}
    waited = {(event.stage, event.segment, event.chunk) for event in measured if event.kind == "wait"}
    assert waited == {(event.stage, event.segment, event.chunk) for event in planned}
    for stage in (0, 1):
        everything = [event for event in measured if event.stage == stage]
        assert all(before.end <= after.start for before, after in pairwise(everything))
        work = [event for event in everything if event.kind in WORK_KINDS]
        ops = [(event.kind, event.segment, event.chunk) for event in work]
        assert ops == [(event.kind, event.segment, event.chunk) for event in planned if event.stage == stage]
        assert all(event.start < event.end for event in work)
