"""The command that starts a rollout server, with drafts."""

import json
import os
import shlex
import stat
from pathlib import Path

import pytest

from forked import run_python
from megatron_dta.commands.rollout_server_command import main
from megatron_dta.core.common.errors import InputError


def test_the_tool_prints_commands_that_a_shell_takes(capsys: pytest.CaptureFixture) -> None:
    flags = "--rollout-speculation das --das-draft-tokens 12 --das-depth 20 --das-window 3"
    flags += " --rollout-batch-size 5 --n-samples-per-prompt 4 --rollout-max-response-len 400000"
    fixed_flags = [*flags.split(), "--rollout-temperature", "0.7", "--model", "/my models/m"]

    def printed(*arguments: str) -> str:
        main(list(arguments))
        return capsys.readouterr().out

    transfer = printed("--rollout-engine", "vllm", "--rollout-weight-transfer", "ipc", *fixed_flags)
    assert shlex.split(transfer)[:2] == ["VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_INSECURE_SERIALIZATION=1"]
    assert shlex.split(transfer)[-2:] == ["--weight-transfer-config", '{"backend": "ipc"}']
    for kind in ("vllm", "sglang"):
        experts = printed(
            "--rollout-engine", kind, "--num-experts", "8", "--moe-routing-replay", "first", "--model", "m"
        )
        assert shlex.split(experts)[-1] == "--enable-return-routed-experts"
    words = shlex.split(printed("--rollout-engine", "vllm", *fixed_flags, "--", "--tensor-parallel-size", "2"))
    assert words[:6] == ["VLLM_SERVER_DEV_MODE=1", "vllm", "serve", "/my models/m", "--port", "8000"]
    assert words[6:8] == ["--logprobs-mode", "processed_logprobs"]
    assert words[-2:] == ["--tensor-parallel-size", "2"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "suffix",
        "num_speculative_tokens": 12,
        "suffix_decoding_max_tree_depth": 20,
        # 3 x 5 x 4 responses in the window, but only 50 of 400,000 tokens fit.
        "suffix_decoding_max_cached_requests": 50,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    words = shlex.split(printed("--rollout-engine", "sglang", *fixed_flags, "--port", "30000", "--host", "10.0.0.1"))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[3:9] == ["--model-path", "/my models/m", "--port", "30000", "--host", "10.0.0.1"]
    options = dict(zip(words[9::2], words[10::2], strict=True))
    assert options == {
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": "13",
        "--speculative-ngram-max-trie-depth": "20",
        "--speculative-ngram-match-type": "PROB",
    }
    # Without speculation nothing of it is said.
    plain = printed("--rollout-engine", "sglang", "--model", "m")
    assert plain == "python -m sglang.launch_server --model-path m --port 8000\n"


def test_the_tool_becomes_the_server(tmp_path: Path) -> None:
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\necho "$VLLM_SERVER_DEV_MODE" "$@"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "run.args").write_text("--rollout-engine vllm  # shared with training\n--task arithmetic\n")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    flags = f"--exec @{tmp_path}/run.args --model m -- --seed 4".split()
    done = run_python(["tools/rollout_server_command.py", *flags], env=environment)
    assert (done.returncode, done.stdout) == (0, "1 serve m --port 8000 --seed 4\n"), done.stderr


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--rollout-engine vllm", "which model the server is to load is not known"),
        ("--rollout-engine vllm --model m --port 0", "--port 0: must be a port"),
        ("--rollout-engine vllm --model", "expected one argument"),
        ("--exec --rollout-engine vllm --model m", "vllm: cannot be run"),
    ],
)
def test_the_tool_refuses(flags: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "")  # put back afterwards
    with pytest.raises(InputError, match=match):
        main(flags.split())
