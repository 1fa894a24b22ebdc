"""A command whose last step is already saved reports this and exits with status 0."""

import subprocess
from pathlib import Path

import pytest

from forked import run_python
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.checkpoint.files import TRACKER
from megatron_dta.training.checkpoint.finished import check_export, finished, note_export
from megatron_dta.training.config import TrainConfig

MODEL = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --max-position-embeddings 16 --vocab-size 16"
TASK = "--task arithmetic --arithmetic-max-operand 9 --rollout-max-response-len 3 --rollout-batch-size 2"
COMMAND = f"{MODEL} {TASK} --n-samples-per-prompt 2"


def settings(folder: Path, train_iters: int, export: bool = False) -> TrainConfig:
    config = parse_arguments(f"{COMMAND} --train-iters {train_iters} --save {folder}/run".split())
    if export:
        config.checkpoint.save_hf = str(folder / "hf")
    return config


def saved(folder: Path, iteration: int) -> None:
    """What of a checkpoint is looked at."""
    path = folder / "run" / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    (path / "metadata.json").write_text("{}")
    (folder / "run" / TRACKER).write_text(str(iteration))


def exported(folder: Path, config: TrainConfig, iteration: int) -> None:
    """Write a folder as the run does."""
    unfinished = folder / "hf.unfinished"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"weights")
    note_export(config, iteration, unfinished)
    unfinished.rename(folder / "hf")


def test_an_export_is_recognised(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    config = settings(tmp_path, 5, export=True)
    assert finished(config) is None  # the export is missing, so the run writes it
    check_export(config)
    exported(tmp_path, config, 5)
    (tmp_path / "hf" / "README.md").write_text("written by hand")
    assert (finished(config) or [])[1:] == [f"{tmp_path}/hf: holds the model after step 5"]
    check_export(config)
    # More steps would be exported into the same folder.
    with pytest.raises(InputError, match="hf: holds what this run exported after step 5; give another folder"):
        check_export(settings(tmp_path, 6, export=True))
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"others")
    assert finished(config) is None
    with pytest.raises(InputError, match="hf: exists already"):
        check_export(config)


def train(*flags: str) -> subprocess.CompletedProcess:
    command = ["-m", "megatron_dta.train", *COMMAND.split(), *flags]
    return run_python(command)


def test_commands_end_well_or_leave_nothing(tmp_path: Path) -> None:
    """A finished command started again changes nothing; a refused one leaves no folder behind."""
    run = ["--train-iters", "1", "--save", str(tmp_path / "run")]
    done = train(*run)
    assert done.returncode == 0, done.stderr
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    done = train(*run)
    assert (done.returncode, done.stderr) == (0, "")
    assert "already at --train-iters 1; nothing is left to train" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    done = train("--train-iters", "1", "--save", str(tmp_path / "new" / "run"), "--load", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr == f"error: --load {tmp_path}/none: holds no checkpoint\n"
    assert not (tmp_path / "new").exists()
