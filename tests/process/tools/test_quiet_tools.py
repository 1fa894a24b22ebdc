"""Importing a tool that needs Megatron prints no warnings about packages that Megatron misses."""

import logging
import subprocess
import sys
import warnings

import pytest

from conftest import REPOSITORY
from megatron_dta.common.quiet import quieten_libraries


def test_imports_say_nothing_and_leave_the_compiler_out() -> None:
    imports = "import sys, megatron_dta.commands.check_parity; assert 'torch._inductor.compile_fx' not in sys.modules"
    command = [sys.executable, "-c", imports]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


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
