"""A real vLLM server on this machine's GPU, in processes of its own, with a model of random weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.training.huggingface.config.config_output import config_from_settings

START_S = 400
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # handles of memory are pickled
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_server(model: ModelConfig, flags: Sequence[str]) -> Iterator[str]:
    """The URL of a server, in this interpreter's environment, that takes weights through memory of the GPU.

    Args:
        flags: more flags of ``vllm serve``, which come last.

    Raises:
        InputError: the server has ended, or does not answer; the message has the end of its log.
    """
    with TemporaryDirectory() as name, socket.socket() as listener:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config_from_settings(model)), encoding="utf-8")
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", name]
        command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--skip-tokenizer-init"]
        command += ["--weight-transfer-config", json.dumps({"backend": "ipc"}), *flags]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=os.environ | _ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, folder / "log")
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    state = "does not answer" if process.poll() is None else f"has ended with {process.returncode}"
    raise InputError(f"vLLM {state}; the end of its log:\n{log.read_text(errors='replace', encoding='utf-8')[-6000:]}")
