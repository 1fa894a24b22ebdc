"""Programs and settings for tests of ``code_tests`` with every kind of isolation."""

from __future__ import annotations

import pytest

from megatron_dta.common.errors import InputError
from megatron_dta.config.sampling import RewardConfig
from megatron_dta.sampling.rewards.code_reward import CodeTests

QUICK = RewardConfig(code_time_seconds=1.0, code_memory_mb=256, code_processes=4)
ADD = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"


def isolated(isolation: str, settings: RewardConfig = QUICK) -> CodeTests:
    """Programs run in this way, or the test is skipped."""
    function = CodeTests(settings, (isolation,))
    try:
        assert function.isolation == isolation
    except InputError as error:
        pytest.skip(f"{isolation} does not work here: {error}")
    return function


def fenced(code: str) -> str:
    return f"Let me think.\n```python\n{code}\n```\nDone."
