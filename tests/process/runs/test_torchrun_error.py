"""Under torchrun the line that names a wrong flag comes after the launcher's own report."""

from __future__ import annotations

import os
import subprocess
import sys

from conftest import REPOSITORY


def test_the_refusal_is_the_last_line() -> None:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_dta.train --lr -1 --num-layers 1"
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, *launcher.split()], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith("error")
    assert "the following arguments are required" in lines[-1]
    assert any("ChildFailedError" in line for line in lines[:-1])
