"""``code_tests``: what programs may not do, what counts as right, and where programs run."""

import base64
import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hostile_programs
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.config.sampling import RewardConfig
from megatron_dta.sampling.rewards import code_reward, server_reward
from megatron_dta.sampling.rewards.code_reward import CodeTests, program_in
from megatron_dta.sampling.rewards.code_sandbox import running
from megatron_dta.sampling.rewards.code_sandbox.forms import tests_of as read_tests
from megatron_dta.sampling.rewards.code_sandbox.running import INSIDE
from one_reward import compute_reward
from reward_server import RewardServer

ECHO = {"inputs": ["x"], "outputs": ["x"]}
GOOD = "def add(a, b): return a + b"
ADD = {"fn_name": "add", "inputs": [[2, 3], [-1, 1]], "outputs": [5, 0]}


def confined(processes: int = 4, seconds: float = 1.0) -> CodeTests:
    """Programs run in bubblewrap, or the test is skipped where nothing runs in it."""
    function = _confined(processes, seconds)
    function.counts["code_timeouts"] = 0
    return function


@cache
def _confined(processes: int, seconds: float) -> CodeTests:
    """Probed once, not by each test."""
    try:
        subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    return CodeTests(RewardConfig(code_timeout=seconds, code_memory_mb=256, code_processes=processes))


def fenced(code: str) -> str:
    return f"Let me think.\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        (GOOD, 1),
        (f"import atexit, threading\n{GOOD}\nthreading.Thread(target=print).start()", 1),
        ("class Solution:\n    def add(self, a: int, b: Optional[int]): return sum(accumulate([a, b])) - a", 1),
        ("def add(a, b): return a - b", 0),
        ("", 0),  # operator.add is among the names that are there without an import
        (f"{GOOD}\nimport os\nos._exit(0)", 0),
        (f"{GOOD}\nx = bytearray(1 << 30)", 0),
        (f"{GOOD}\nopen('big', 'wb').write(b'x' * (9 << 20))", 0),
        ("\x00", 0),
    ],
)
def test_programs_are_judged_by_their_tests(code: str, reward: int) -> None:
    function = confined()
    assert compute_reward(function, "p", {"tests": ADD}, fenced(code), []) == reward
    assert function.counts["code_timeouts"] == 0


def test_the_first_failed_test_is_named() -> None:
    function, record = confined(), {"tests": {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [1, 2, 3]}}
    assert function.verdict(record, "f = lambda x: x")["passed"]
    assert function.verdict(record, "f = lambda x: min(x, 1)") == {
        "passed": False, "stopped": False, "failed": 1, "output": "1"
    }  # fmt: skip
    assert function.verdict(record, "def f(x): return 'a' * x * 300")["output"] == '"' + "a" * 199


def test_standard_input_and_output() -> None:
    function = confined()
    tests = {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -7", "output": "-2"}]}
    for code, reward in (
        ("a, b = map(int, input().split())\nprint(a + b, ' ')", 1),
        ("import sys\ndef main(): print(sum(map(int, sys.stdin.buffer.read().split())))\n"
         "import threading\nthreading.Thread(target=main).start()", 1),
        ("print(sum(map(int, input().split())))\nexit()", 1),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0),
    ):  # fmt: skip
        assert compute_reward(function, "p", tests, fenced(code), []) == reward, code
    prefix = {"code_prefix": "def add(a, b):\n", "tests": ADD}
    assert compute_reward(function, "p", prefix, "    return a + b", []) == 1


def test_the_program_is_the_last_python_block() -> None:
    assert program_in("```python\na\n``` and ```py\nb\n``` and ```bash\nc\n```") == "b\n"
    assert program_in("```\nx = 1") == "x = 1"
    assert program_in("no fence") == "no fence"


def test_hostile_programs_get_nothing_and_leave_nothing(tmp_path: Path) -> None:
    wrong = hostile_programs.attack(confined(processes=8), 14, 1, tmp_path, 6)
    assert not wrong, "\n".join(wrong)


FACTS = """
import os, socket
def facts(secret):
    def can(open_it, *arguments):
        try: return open_it(*arguments) and True
        except OSError: return False
    return {
        "root": os.getuid() == 0,
        "secret": os.path.exists(secret) or "DTA_SECRET" in os.environ,
        "sockets": [family for family in range(2, 46) if can(socket.socket, family, socket.SOCK_DGRAM)],
        "writes": [path for path in ("/x", "/dev/x", "/usr/x", "/proc/sys/kernel/ns_last_pid", "/proc/pressure/memory")
                   if can(open, path, "w")],
        "memory": can(os.memfd_create, "x") or can(open, f"/proc/{os.getppid()}/mem", "r+b"),
        "first": os.listdir("/proc/1"),
        "read-only": [os.statvfs(path).f_flag & 1 for path in ("/", "/usr", "/dev", "/proc/sys", "/scripts")],
        "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
        "space": os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize >> 20,
        "privileges": [line[8:].strip("0\\n") for line in open("/proc/self/status") if line[:4] in ("CapP", "CapE")],
    }
"""


def test_what_a_program_can_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTA_SECRET", "token")
    (tmp_path / "prompts.jsonl").write_text("the tests")
    expected = {"root": False, "secret": False, "sockets": [], "writes": [], "processes": 3, "space": 256}
    expected |= {"read-only": [1] * 5, "memory": False, "first": []}
    tests = {"fn_name": "facts", "inputs": [[str(tmp_path)]], "outputs": [{**expected, "privileges": ["", ""]}]}
    assert confined()({"tests": tests}, fenced(FACTS), []) == 1


LEAVES = """
import os, subprocess, time
def is_alone():
    return sum(map(str.isdigit, os.listdir("/proc"))) == 3
end = time.monotonic() + 5
while not is_alone() and time.monotonic() < end: time.sleep(0.01)
def add(a, b): return a + b if is_alone() and subprocess.Popen(["sleep", "97532"], start_new_session=True) else None
"""


def test_what_a_program_leaves_behind_ends_with_each_test() -> None:
    assert confined()({"tests": ADD}, fenced(LEAVES), []) == 1
    end = time.monotonic() + 20
    while lives := [file for file in Path("/proc").glob("[0-9]*/cmdline") if b"97532" in _bytes(file)]:
        assert time.monotonic() < end, lives
        time.sleep(0.1)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_cpu_time_decides_however_busy_the_machine() -> None:
    function = confined(seconds=0.5)
    code = "import time\nwhile time.process_time() < {}: pass\nprint(input())"
    with ThreadPoolExecutor(4) as pool:
        rewards = pool.map(lambda _: function({"tests": ECHO}, fenced(code.format(0.3)), []), range(4))
        assert list(rewards) == [1.0] * 4
    assert function({"tests": ECHO}, fenced(code.format(0.7)), []) == 0
    assert function.counts["code_timeouts"] == 1


def test_programs_that_wait_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_reward.Sandbox, "START_SECONDS", 1.0)
    function = confined()
    for code in ("import time\nwhile True: time.sleep(0.01)", "import signal\nsignal.raise_signal(signal.SIGSTOP)"):
        assert function({"tests": ECHO}, fenced(code), []) == 0
    assert function.counts["code_timeouts"] == 2


def test_programs_may_be_stopped_before_their_judge_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    function = confined()
    monkeypatch.setattr(running, "MOST_FILES", -1)
    monkeypatch.setattr(running, "SAMPLE_MS", 1)
    assert [function({"tests": ECHO}, fenced("print(input())"), []) for _ in range(3)] == [0, 0, 0]
    assert function.counts["code_timeouts"] == 3


def test_without_bubblewrap_programs_run_only_where_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_reward.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"programs do not run here, .* bwrap is not installed; .*--code-unconfined"):
        CodeTests(RewardConfig())
    function = CodeTests(RewardConfig(code_timeout=1.0, code_memory_mb=256, code_unconfined=True))
    assert "with resource limits only, because bubblewrap does not work here (bwrap is not installed)" in function.reach
    for code, reward in ((GOOD, 1), ("add = max", 0), ("while True: pass", 0), ("x = bytearray(1 << 30)", 0)):
        assert function({"tests": ADD}, fenced(code), []) == reward


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        (" 1  2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("0.33333333", "0.3333333", True),
        ("1e999999999", "1.5", False),
        ("nan", "nan", True),
        ("YES", "yes", False),
        # From here on as data.
        ("[1, 2]", [1, 2], True),
        ('{"1": [0.30000000000000004]}', {"1": [0.3]}, True),
        ("1.0", 1, True),
        ("10000001.0", 10000000, False),
        ("NaN", 10**400, False),
        ("null", 0, False),
        ('"5"', 5, False),
        ("[" * 100_000, [], False),
        ("", None, False),
    ],
)
def test_texts_are_compared_by_tokens_and_values_as_data(output: str, expected: object, same: bool, judge: Any) -> None:
    assert judge.is_accepted(output.encode(), [expected], is_json=not isinstance(expected, str)) is same


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(INSIDE)
    import judge

    return judge


def _private(cases: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"tests": [{"input": "a", "output": "b"}]}, (None, ["a"], [["b"]])),
        ({"answer": '{"inputs": [["1", "2"]], "outputs": ["3\\n"]}'}, (None, ["1\n2"], [["3\n"]])),
        ({"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}'}, ("f", [[1]], [[[2], 2]])),
        ({"tests": [{"fn_name": "f", "input": [[1]], "output": [1, 2]}]}, ("f", [[[1]]], [[[1, 2]]])),
        (
            {
                "public_test_cases": '[{"input": "[1]\\n2", "output": "3", "testtype": "functional"}]',
                "private_test_cases": _private([{"input": "[]\n1", "output": "null", "testtype": "functional"}]),
                "metadata": '{"func_name": "f"}',
            },
            ("f", [[[1], 2], [[], 1]], [[3], [None]]),
        ),
    ],
)
def test_forms_of_public_data_sets(record: dict[str, Any], expected: tuple[Any, ...]) -> None:
    tests = read_tests(record)
    assert (tests.function, tests.inputs, tests.accepted) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "has no tests"),
        ({"tests": "assert add(1, 2) == 3"}, "'tests' is not JSON; tests that are Python code are not run"),
        ({"tests": base64.b64encode(zlib.compress(pickle.dumps(os.getcwd))).decode()}, "is not JSON"),
        ({"tests": [{"input": "a"}]}, "entry 0: 'input' and 'output' must both be text"),
        ({"tests": [{"fn_name": "f", "input": [], "output": 1}, {"input": "", "output": ""}]}, "the same function"),
    ],
)
def test_tests_in_other_forms_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_tests(record)


def _fusion(body: dict[str, Any]) -> dict[str, Any]:
    """What SandboxFusion answers."""
    assert body["language"] == "python"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", body["code"]], input=body["stdin"], capture_output=True, text=True, timeout=20
        )
    except subprocess.TimeoutExpired:
        return {"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded"}}
    result = {"status": "Finished", "return_code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}
    return {"status": "Failed" if ran.returncode else "Success", "message": "", "run_result": result}


def test_programs_run_on_a_sandbox_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_reward, "FIRST_PAUSE_S", 0.02)
    echo = "import sys\nsys.stdout.write(sys.stdin.read())"
    with RewardServer(("status", 503), _fusion) as server:
        function = CodeTests(RewardConfig(code_sandbox_url=[server.url], code_timeout=1.0))
        assert function({"tests": ADD}, fenced(f"print('noise')\n{GOOD}"), []) == 1
        assert function({"tests": ADD}, fenced("add = max"), []) == 0
        assert function({"tests": ECHO}, fenced(echo), []) == 1
        assert function({"tests": ECHO}, fenced("print('x')\nraise KeyError"), []) == 0
        assert all("outputs" not in body and "5" not in str(body["stdin"]) for body in server.bodies)
    late = {"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded", "stdout": "x"}}
    with RewardServer(late, {"status": "SandboxError", "message": "no pod"}, b"nonsense") as server:
        function = CodeTests(RewardConfig(code_sandbox_url=[server.url]))
        assert function({"tests": ECHO}, fenced(echo), []) == 0
        assert function.counts == {"code_timeouts": 1}
        for message in ("the program did not run: no pod", "the reply is not JSON"):
            with pytest.raises(InputError, match=message):
                function({"tests": ECHO}, fenced(echo), [])
