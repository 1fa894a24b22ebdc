"""Output folders that cannot be written, disks that fill up, and clocks that may be set."""

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from conftest import REPOSITORY
from forked import run_python
from megatron_dta.training.checkpoint.files import find_checkpoint

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --task arithmetic "
    "--arithmetic-max-operand 3 --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 4 "
    "--lr 1e-3 --train-iters 4 "
)
# A process that is root may write everywhere, until it gives that up.
WITHOUT_PRIVILEGES = """
import ctypes, io, json, os, sys
from pathlib import Path
from megatron_dta.common.console import Console
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.core.common.errors import InputError
from megatron_dta.wiring.setup import build_trainer

if os.getuid() == 0:
    empty = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), empty) == 0
told = {}
for name, flags, late in json.loads(sys.argv[1]):
    try:
        trainer = build_trainer(parse_arguments(flags.split()), Console(file=io.StringIO()))
        report = trainer._report
        def shut(record):
            report(record)
            if late and record["iteration"] == 3:
                os.chmod(late, 0o555)
        trainer._report = shut
        trainer.run()
        told[name] = ""
    except InputError as error:
        told[name] = str(error)
print(json.dumps(told))
"""


def test_folders_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    """At the start, before anything is sampled; or when it happens, with what was saved before kept."""
    cases = []
    for name in ("--save", "--tensorboard-dir", "--timeline-dir"):
        folder = tmp_path / name.strip("-")
        folder.mkdir()
        folder.chmod(0o555)
        cases.append((name, f"{FLAGS}{name} {folder}", None))
    for name, flags, late in (
        ("checkpoint", "", ""),
        ("background checkpoint", "--async-save", ""),
        ("rollouts", "--save-rollouts-interval 1", "rollouts"),
    ):
        folder = tmp_path / name.replace(" ", "-")
        cases.append((name, f"{FLAGS} --save {folder} --save-interval 1 {flags}", str(folder / late)))
    program = tmp_path / "without_privileges.py"
    program.write_text(WITHOUT_PRIVILEGES)
    done = run_python([program, json.dumps(cases)])
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for name in list(told)[:3]:
        assert told[name].startswith(f"{name}: the folder {tmp_path / name.strip('-')} cannot be written")
    for name in list(told)[3:]:
        folder = tmp_path / name.replace(" ", "-")
        assert str(folder) in told[name], told
        assert "cannot be written" in told[name]
        assert (folder / "iter_0000001" / "metadata.json").is_file()
    assert all(message.isprintable() for message in told.values())


def train(folder: Path, *flags: str, largest_file: int | None = None) -> CompletedProcess:
    """Run a command that may write no file beyond some bytes: the system refuses, as it does on a full disk."""
    command = ["-m", "megatron_dta.train", *FLAGS.split(), "--save", folder, *flags]
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
        flags = ("--save-interval", "1", "--train-iters", "2", "--async-save")
        ends_well(train(tmp_path, *flags, largest_file=sizes[name] - 100), "iter_0000002: the checkpoint cannot be")
        assert not list(tmp_path.glob("*.tmp"))
        assert find_checkpoint(tmp_path).name == "iter_0000001"


def test_no_room_for_metrics(tmp_path: Path) -> None:
    result = train(tmp_path, "--train-iters", "60", largest_file=12_000)
    ends_well(result, "cannot be written (File too large)")


@pytest.mark.parametrize("folder", ["megatron_dta", "kernels", "tools"])
def test_durations_are_of_clocks_that_are_never_set(folder: str) -> None:
    for path in (REPOSITORY / folder).rglob("*.py"):
        # A point in time that is only shown or given to another program, not subtracted, may come from the wall clock.
        text = re.sub(r"datetime\.now\(\)(\.astimezone\(\))?\.isoformat\(timespec=\"seconds\"\)", "", path.read_text())
        for shown in ("str(datetime.now().timestamp())", "int(time.time())", "date or datetime.now()"):
            text = text.replace(shown, "")
        assert not any(
            word in text for word in ("time.time()", "datetime.now", "import time as", "from time import")
        ), path
