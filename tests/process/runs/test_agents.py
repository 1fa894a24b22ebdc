"""Agents in whole runs: commands that fail, hang or are killed with their run; and the gateway command."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from chat_folder import make_chat_folder
from conftest import REPOSITORY
from forked import Program, run_python, run_ranks
from megatron_dta.core.rollouts.load import load_rollouts

AGENT = REPOSITORY / "tests" / "helpers" / "tiny_agent.py"
MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--max-position-embeddings", "128"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer in ``model`` and prompts."""
    folder = tmp_path_factory.mktemp("agents")
    make_chat_folder(folder / "model")
    rows = [{"prompt": f"question {i}"} for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def text(chat: Path) -> list[str]:
    return f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {chat}/model --apply-chat-template".split()


def command(chat: Path, save: Path, what: str, *more: str) -> list[str]:
    task = ["--prompt-data", str(chat / "prompts.jsonl"), "--agent-command", f"{sys.executable} -S {AGENT} {what}"]
    sizes = f"--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 6 --lr 1e-2 --save {save}"
    return ["-m", "megatron_dta.train", *MODEL, *text(chat), *task, *sizes.split(), *more]


def rows(save: Path) -> list[dict]:
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


MORE = ["--train-iters", "2", "--save-interval", "1", "--save-rollouts-interval", "1"]


@pytest.fixture(scope="module")
def unbroken(chat: Path) -> Path:
    """The folder of a run."""
    done = run_python(command(chat, chat / "run", "post", *MORE))
    assert done.returncode == 0, done.stderr
    return chat / "run"


def test_a_killed_run_continues(chat: Path, unbroken: Path, tmp_path: Path) -> None:
    """Killed while agents run, and started again: the steps and rewards of an unbroken run; no process is left."""
    broken = Program(command(chat, tmp_path / "broken", "post", *MORE))
    metrics = tmp_path / "broken" / "metrics.jsonl"
    broken.wait_until(lambda: metrics.exists() and bool(metrics.read_text()))
    os.kill(broken.pid, signal.SIGKILL)
    broken.wait()
    done = run_python(command(chat, tmp_path / "broken", "post", *MORE))
    assert done.returncode == 0, done.stderr
    continued, expected = rows(tmp_path / "broken"), rows(unbroken)
    assert [row["iteration"] for row in continued] == [1, 2]
    for name in ("reward", "loss", "grad_norm", "sessions", "agent_calls", "session_tokens"):
        assert [row[name] for row in continued] == pytest.approx([row[name] for row in expected], abs=1e-5)
    assert continued[0]["sessions"] == 4
    assert continued[0]["agent_calls"] == 8
    assert continued[0]["failed_sessions"] == 0
    assert continued[0]["session_tokens"] < continued[0]["session_row_tokens"]
    sessions = [json.loads(line) for line in (unbroken / "sessions/batch_0000001.jsonl").read_text().splitlines()]
    assert [call["parent"] for call in sessions[0]["calls"]] == [None, 0]
    # A report of the sessions, without charts of all metrics.
    shutil.copytree(unbroken / "sessions", tmp_path / "report" / "sessions")
    (tmp_path / "report" / "metrics.jsonl").write_text('{"iteration": 1}\n')
    report = run_python(["tools/report_run.py", tmp_path / "report"])
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Sessions of agents" in page
    assert sessions[0]["session"] in page


def test_ranks_of_a_mesh(chat: Path, unbroken: Path, tmp_path: Path) -> None:
    """Replicas have gateways of their own and share the sessions; the ranks of a tensor group follow the first."""
    for name, flags in (("data", []), ("tensor", ["--tensor-model-parallel-size", "2"])):
        for rank in run_ranks(command(chat, tmp_path / name, "post", "--train-iters", "1", *flags), 2):
            assert rank.returncode == 0, rank.stderr
    expected, data, tensor = rows(unbroken), rows(tmp_path / "data"), rows(tmp_path / "tensor")
    for metric in ("reward", "loss", "session_tokens"):
        assert [row[metric] for row in data] == pytest.approx([expected[0][metric]], abs=1e-5)
    assert [row["agent_calls"] for row in tensor] == [8]
    assert [row["failed_sessions"] for row in tensor] == [0]


def test_failing_and_printing_agents(chat: Path, tmp_path: Path) -> None:
    """Failed sessions are counted and dropped; a hanging agent is stopped with its children; others print a reward."""
    some = tmp_path / "prompts.jsonl"
    some.write_text("".join(f'{{"prompt": "question {number}"}}\n' for number in (3, 4, 5)))
    sizes = ["--train-iters", "1", "--rollout-batch-size", "3", "--agent-timeout", "6"]
    begun = time.monotonic()
    run = command(chat, tmp_path / "run", "fail-hang-print", *sizes)
    done = run_python([str(some) if word.endswith("prompts.jsonl") else word for word in run])
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "run")
    assert (row["sessions"], row["failed_sessions"], row["rollouts"], row["agent_timeouts"]) == (6, 4, 2, 2)
    assert time.monotonic() - begun < 100
    left = subprocess.run(["pgrep", "-f", "time.sleep(600)"], capture_output=True, text=True, check=False).stdout
    mine = [pid for pid in left.split() if f"{tmp_path}" in Path(f"/proc/{pid}/environ").read_text(errors="ignore")]
    assert not mine
    prompt = tmp_path / "prompt.jsonl"
    prompt.write_text('{"prompt": "question 3"}\n')
    stop = ["--rollout-failure", "stop", "--rollout-batch-size", "1", "--prompt-data", str(prompt)]
    stopped = run_python(command(chat, tmp_path / "stop", "fail", "--train-iters", "1", *stop))
    assert stopped.returncode == 2
    assert "ended with status 3: a reason" in stopped.stderr


def test_the_gateway_as_a_command(chat: Path, unbroken: Path, tmp_path: Path) -> None:
    """Closed sessions with a reward are rollouts in a file, which a restarted gateway continues after a kill."""
    output = tmp_path / "sessions.jsonl"
    arguments = ["-m", "megatron_dta", "gateway", "--output", str(output), "--load", str(unbroken)]
    for round_number in (1, 2):
        process = Program(
            [*arguments, *MODEL, *text(chat), "--rollout-max-response-len", "6", "--gateway-max-calls", "9"]
        )
        process.wait_until(lambda process=process: "sessions to" in process.stdout())
        line = next(line for line in process.stdout().splitlines() if line.startswith("gateway: http://127.0.0.1:"))
        url, key = line.split()[1], output.with_suffix(".key").read_text().strip()
        assert output.with_suffix(".key").stat().st_mode & 0o077 == 0
        _drive(url, key)
        assert len(load_rollouts(output)) == round_number
        if round_number == 1:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with output.open("a") as file:
                file.write('{"token_ids": [1, 2')  # a write that the kill has cut off
        else:
            os.kill(process.pid, signal.SIGTERM)
            ended = process.wait(60)
            assert ended.returncode == 0, ended.stderr
            assert "1 sessions recorded, 2 failed or unfinished ones dropped" in ended.stdout
    (first, second) = load_rollouts(output)
    assert first.reward == second.reward == 0.5
    assert first.loss_mask[-1]
    assert not first.loss_mask[0]
    assert first.group_id == "g"


def _drive(url: str, key: str) -> None:
    def post(path: str, key: str, body: dict) -> dict:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    for end in ("close", "fail", "leave"):
        session = post("/v1/sessions", key, {"group_id": "g"})["key"]
        post("/v1/chat/completions", session, {"messages": [{"role": "user", "content": "hello"}]})
        if end == "leave":
            continue
        post("/v1/session/reward", session, {"reward": 0.5})
        post("/v1/session/close", session, {"failed": end == "fail"})
