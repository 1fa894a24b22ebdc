"""Runs ``slurm/submit.sh``, and skips tests that need Slurm where it is not installed."""

import subprocess

import pytest

from conftest import REPOSITORY
from slurm_cluster import missing_programs

ROOT = REPOSITORY
SUBMIT = ROOT / "slurm" / "submit.sh"
needs_slurm = pytest.mark.skipif(
    bool(missing_programs()), reason=f"Slurm is not installed (slurm-wlm, munge): {', '.join(missing_programs())}"
)


def submit(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = ["bash", str(SUBMIT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
