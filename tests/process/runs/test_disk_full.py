"""A disk that fills up during a run: one line of error, status 2, and the last good checkpoint intact."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

from forked import run_python
from megatron_dta.training.checkpoint.files import find_checkpoint

COMMAND = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --task arithmetic "
    "--arithmetic-max-operand 3 --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 3"
)


def train(folder: Path, *flags: str, largest_file: int | None = None) -> CompletedProcess:
    """Run a command that may write no file beyond some bytes: the system refuses, as it does on a full disk."""
    command = ["-m", "megatron_dta.train", *COMMAND.split(), "--save", folder, *flags]
    return run_python(command, largest_file=largest_file)


def ends_well(result: CompletedProcess, message: str) -> None:
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_no_room_for_a_checkpoint(tmp_path: Path) -> None:
    assert train(tmp_path, "--save-interval", "1", "--train-iters", "1").returncode == 0
    sizes = {path.name: path.stat().st_size for path in find_checkpoint(tmp_path).iterdir()}
    # The list of the tensors' places, the shards, and the state that is the same on all ranks.
    for name in (".metadata", "__0_0.distcp", "common.pt"):
        flags = ("--save-interval", "1", "--train-iters", "4", "--async-save")
        ends_well(train(tmp_path, *flags, largest_file=sizes[name] - 100), "iter_0000002: the checkpoint cannot be")
        assert not list(tmp_path.glob("*.tmp"))
        assert find_checkpoint(tmp_path).name == "iter_0000001"


def test_no_room_for_metrics(tmp_path: Path) -> None:
    result = train(tmp_path, "--train-iters", "60", largest_file=12_000)
    ends_well(result, "cannot be written (File too large)")
