"""Programs and settings for tests of ``code_tests``."""

from __future__ import annotations

import subprocess

import pytest

from megatron_dta.sampling.config.sampling import RewardConfig
from megatron_dta.sampling.rewards.code_reward import CodeTests

QUICK = RewardConfig(code_timeout=1.0, code_memory_mb=256, code_processes=4)
ADD = {"fn_name": "add", "inputs": [[2, 3], [-1, 1]], "outputs": [5, 0]}


def confined(settings: RewardConfig = QUICK) -> CodeTests:
    """Programs run in bubblewrap, or the test is skipped where nothing runs in it."""
    try:
        subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    return CodeTests(settings)


def fenced(code: str) -> str:
    return f"Let me think.\n```python\n{code}\n```\nDone."
