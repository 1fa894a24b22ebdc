"""Cases and helpers that tests of benchmark rollout share."""

from __future__ import annotations

import subprocess
import sys

from conftest import REPOSITORY

TOOL = REPOSITORY / "benchmarks" / "rollout.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)
