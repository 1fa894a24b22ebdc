"""``code_tests`` against hostile programs, and correct programs under tests of many forms."""

from __future__ import annotations

from pathlib import Path

import pytest

import hostile_programs
from conftest import REPOSITORY
from failing_rewards_cases import ADD, fenced, isolated
from hostile_programs import ATTACKS, RECORDS
from megatron_dta.config.sampling import RewardConfig
from megatron_dta.sampling.rewards import code_reward
from megatron_dta.sampling.rewards.code_reward import ISOLATIONS, CodeTests
from megatron_dta.sampling.rewards.code_sandbox import kernel


@pytest.mark.parametrize("number", range(31))
def test_right_programs_pass_tests_of_many_forms(number: int) -> None:
    parts = (REPOSITORY / "tests" / "stress" / "right_programs.txt").read_text().split("### ")[1:]
    code, tests = (part.partition("\n")[2] for part in parts[2 * number : 2 * number + 2])
    if "numpy" in code:
        pytest.importorskip("numpy")
    function = CodeTests(RewardConfig())
    assert function({"tests": tests}, fenced(code), []) == 1
    assert function({"tests": f"{tests}\nassert False"}, fenced(code), []) == 0


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_hostile_programs_get_nothing_and_leave_nothing(isolation: str, tmp_path: Path, request) -> None:
    isolated(isolation)
    if isolation == "limits" and kernel.landlock_version() < 6:
        pytest.skip("this kernel's Landlock restricts neither signals nor all writes")
    count = 64 if isolation == "namespaces" else 24
    # The folder of pytest's cache: /tmp is hidden from programs, so nothing would be shown there.
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir(f"hostile-{isolation}-{tmp_path.name}")) if cache else tmp_path
    for file in sorted(folder.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    wrong, _ = hostile_programs.attack(count, ISOLATIONS.index(isolation), folder, 6, (isolation,))
    assert not wrong, "\n".join(wrong)


def test_what_a_program_does_to_its_folder_is_no_failure_of_the_reward() -> None:
    function = isolated("limits")
    for name in ("fifo out", "unlink all", "folder gone", "folder for file", "dangling", "no rights", "deep folders"):
        for record in (RECORDS[0], RECORDS[5]):
            assert function(record, fenced(ATTACKS[name]), []) == 0, name


@pytest.mark.parametrize("name", ["equal object", "equal zero", "equal int", "equal module", "own builtins", "frames"])
def test_objects_that_equal_everything_equal_no_data(name: str) -> None:
    function = CodeTests(hostile_programs.SETTINGS)
    assert [function(record, fenced(ATTACKS[name]), []) for record in RECORDS[:5]] == [0.0] * 5


def test_programs_without_namespaces_or_bubblewrap_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    function = isolated("limits")
    assert "limits on time, memory and processes only" in function.reach
    assert function({"tests": ADD}, fenced("def add(a, b): return a + b"), []) == 1
    assert function.counts["code_unisolated"] == 1
    # The first way that works is taken.
    monkeypatch.setattr(code_reward.shutil, "which", lambda name: None)
    assert CodeTests(RewardConfig(), ("bubblewrap", "limits")).isolation == "limits"
