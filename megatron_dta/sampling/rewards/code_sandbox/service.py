"""Runs programs on servers with the API of SandboxFusion, which verl and slime use too (``--code-sandbox-url``).

    POST URL   {"code": text, "language": "python", "stdin": text, "run_timeout": seconds, ...}
    answer     {"status": "Success" or "Failed", "run_result": {"status", "return_code", "stdout"}}

One request for each test, up to the first that fails. The server gets the program and the input; the judge, which has
the expected output, runs here. How a program is confined and what its time limit counts is up to the server.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_dta.common.http.replies import TransientFailureError, parse_json
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.config.sampling import RewardConfig
from megatron_dta.sampling.rewards.code_sandbox.forms import ProgramTests
from megatron_dta.sampling.rewards.code_sandbox.running import INSIDE, MOST_OUTPUT_BYTES, Sandbox
from megatron_dta.sampling.rewards.server_reward import JsonServers

# A server may queue the request and start a container.
WAITING_SECONDS = 60.0


class SandboxService:
    """Scores programs that run on a server.

    Args:
        settings: the servers and limits.
        sandbox: where the judge runs.
    """

    def __init__(self, settings: RewardConfig, sandbox: Sandbox) -> None:
        self._settings, self._sandbox = settings, sandbox
        urls = [url if url.rstrip("/").endswith("/run_code") else f"{url.rstrip('/')}/run_code"
                for url in settings.code_sandbox_url or []]  # fmt: skip
        timeout_s = 2 * settings.code_timeout + WAITING_SECONDS
        self._servers = JsonServers("--code-sandbox-url", urls, timeout_s, most_bytes=8 * MOST_OUTPUT_BYTES)

    def score(self, program: str, tests: ProgramTests) -> dict[str, Any]:
        """Run ``program``: the judge's verdict (``CodeTests.verdict``)."""
        return self._sandbox.judge(
            tests, (self._outcome(program, tests.function, test_input) for test_input in tests.inputs)
        )

    def _outcome(self, program: str, function: str | None, test_input: Any) -> bytes:
        """The outcome of one test, in the form that ``run_program.py`` writes."""
        stdin = test_input
        if function is not None:
            stdin = json.dumps(test_input)
            call = f"write_result({program!r}, '/tmp/program.py', {function!r}, json.loads(sys.stdin.read()))"
            program = f"{(INSIDE / 'execute.py').read_text(encoding='utf-8')}\n{call}\n"
        settings = self._settings
        body = {
            "code": program,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": settings.code_timeout,
            "run_timeout": settings.code_timeout,
            "memory_limit_MB": settings.code_memory_mb,
            "files": {},
            "fetch_files": [],
        }
        content, where = self._servers.ask(body)
        try:
            reply = parse_json(content)
        except (ValueError, TransientFailureError):
            raise InputError(f"{where}: the reply is not JSON") from None
        result = reply.get("run_result") if isinstance(reply, dict) else None
        if not isinstance(result, dict) or reply.get("status") not in ("Success", "Failed"):
            message = str(reply.get("message") if isinstance(reply, dict) else reply)[:200]
            raise InputError(f"{where}: the program did not run: {message}")
        is_late = result.get("status") == "TimeLimitExceeded"
        code, output = result.get("return_code"), str(result.get("stdout") or "").encode(errors="replace")
        code = -9 if is_late else code if isinstance(code, int) else 1
        return json.dumps({"code": code, "cpu": 0, "bytes": len(output)}).encode() + b"\n" + output
