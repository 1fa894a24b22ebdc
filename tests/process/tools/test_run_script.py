"""``tests/run.sh`` fails where tests fail, and only there; what failed is the last that it prints."""

import os
import subprocess
from pathlib import Path

import pytest

from conftest import REPOSITORY

# Instead of an interpreter: "fails" for the tests whose arguments hold $FAILING, with a report like pytest's.
INTERPRETER = """#!/bin/sh
case "$*" in
  "-c import site"*) dirname "$0" ;;
  *pytest*$FAILING*) printf '==== FAILURES ====\\nwhat failed\\n'; exit 1 ;;
esac
"""


@pytest.mark.parametrize(("failing", "status"), [("none", 0), ("tests/verl", 1), ("-n auto", 1)])
def test_the_exit_status_is_that_of_the_tests(failing: str, status: int, tmp_path: Path) -> None:
    for name in ("venv", "venv-verl"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(INTERPRETER)
        python.chmod(0o755)
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), "WORKERS": "auto", "FAILING": failing}
    done = subprocess.run(["bash", "tests/run.sh"], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.endswith("what failed\n") == (status == 1)
