"""Importing any tool prints no warnings about packages that Megatron misses."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest

from conftest import REPOSITORY
from megatron_dta.core.common.quiet import quieten_libraries

TOOLS = sorted(
    path
    for folder in ("tools", "benchmarks")
    for path in (REPOSITORY / folder).glob("*.py")
    # verl has its own environment.
    if "__main__" in (text := path.read_text()) and "from verl" not in text
)
# Each tool runs in a forked process in which all but Megatron, and what needs it, is loaded already.
IMPORT_ALL = """
import os, runpy, sys
import matplotlib.figure, rich.console, tokenizers, yaml
import torch._inductor.compile_fx, torch.distributed.checkpoint, torch.distributed.tensor, torch.utils.tensorboard
import megatron_dta.core.planning, megatron_dta.core.rollouts
assert "megatron.core" not in sys.modules
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        sys.path.insert(0, os.path.dirname(path))
        runpy.run_path(path, run_name="imported")
        if "megatron.core" in sys.modules:
            print(os.path.basename(path), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, path
"""


def test_imports_say_nothing() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, *map(str, TOOLS)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    # Those that import Megatron at once; the others do so when their flags are checked, or never.
    assert {"rollout.py", "train.py", "check_parity.py"} <= set(result.stdout.split())


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_distributed_optimizer_says_nothing_on_any_rank(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quieten_libraries()
        warnings.warn("The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.", stacklevel=1)
    assert caught == []


@pytest.mark.parametrize(("module", "shown"), [("fla.utils.hardware", 0), ("flatten", 1), ("my_reward", 1)])
def test_warnings_of_libraries_are_hidden(
    module: str, shown: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quieten_libraries()
        warnings.warn_explicit("Triton is not supported", UserWarning, "file.py", 1, module=module)
    assert len(caught) == shown
    # The handler of last resort prints what no other handler takes.
    record = logging.LogRecord(module, logging.WARNING, "file.py", 1, "message", (), None)
    logging.lastResort.handle(record)
    assert ("message" in capsys.readouterr().err) == bool(shown)
