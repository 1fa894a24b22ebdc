"""Measures the update of a server's weights, on one GPU: through its memory (CUDA IPC) against a folder.

    python benchmarks/weight_transfer.py --shape 8b [--ways ipc folder] [--folder /dev/shm/weights] [--repeats 3]
        [--receiver stand-in|vllm] [--vllm-flags="--enforce-eager"] [--output FILE.json]

The trainer's side is that of a run: a model on the mesh with random weights, the copy or the files that training waits
for ("write"), and the engine that updates the servers ("update"). The server is another process on the same GPU. The
stand-in does with the weights what vLLM does, and samples nothing (``common/servers``); with --receiver vllm
it is vLLM itself, which this interpreter must be able to import. "pause" is the time in which the server may not
sample, from the request to pause to the reply that it continues. Afterwards its parameters are compared with the
trainer's: for vLLM by their SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import shlex
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.benchmark_model import settings_of
from common.engine import MODELS
from common.report import Report
from common.servers.vllm_server import vllm_server
from common.servers.weight_receiver import byte_sum, receive
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.common.http.replies import parse_json
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.http_client import Server
from megatron_dta.extras.servers.vllm import VllmProtocol
from megatron_dta.extras.servers.weights.groups import group_opener
from megatron_dta.extras.servers.weights.send import rollout_weights
from megatron_dta.sampling.config import SamplingConfig
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.huggingface.save import hf_weights

# Parameters of vLLM that join several of the model's.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--shape", choices=list(MODELS), default="tiny")
    parser.add_argument("--ways", nargs="+", choices=("ipc", "folder"), default=["ipc", "folder"])
    parser.add_argument("--folder", default="/dev/shm/rollout-weights", help="of the checkpoints")
    parser.add_argument("--receiver", choices=("stand-in", "vllm"), default="stand-in")
    parser.add_argument(
        "--vllm-flags",
        type=shlex.split,
        default=["--gpu-memory-utilization", "0.5", "--enforce-eager"],
        help="of its server (default: half of the GPU, no CUDA graphs, for a quick start)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed updates, after one that is not (default 3)")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def run_config(arguments: argparse.Namespace, way: str) -> TrainConfig:
    """The settings of a run that updates a server."""
    settings = settings_of(MODELS[arguments.shape]) | dict(untie_embeddings_and_output_weights=True)
    model = ModelConfig(**settings, max_position_embeddings=4096, bf16=True)
    sampling = SamplingConfig(
        rollout_engine="vllm",
        rollout_server_url=["http://127.0.0.1:1"],
        rollout_weight_transfer=way,
        rollout_weights_dir=arguments.folder,
    )
    return TrainConfig(model, sampling=sampling)


class TimedProtocol(VllmProtocol):
    """Notes how long the server pauses.

    Attributes:
        pauses: seconds, one for each update.
    """

    def __init__(self, way: str) -> None:
        super().__init__(open_group=None if way == "folder" else group_opener(way, self.meets_by_unique_id))
        self.pauses: list[float] = []
        self._paused_at = 0.0

    async def _pause(self, server: Server, running: bool) -> None:
        self._paused_at = time.perf_counter()
        await super()._pause(server, running)

    async def _continue(self, server: Server, label: str) -> None:
        await super()._continue(server, label)
        self.pauses.append(time.perf_counter() - self._paused_at)


@contextmanager
def stand_in(device: torch.device) -> Iterator[str]:
    """The URL of a server in another process."""
    context = multiprocessing.get_context("forkserver")  # which has not touched a GPU
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(device, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def check_values(config: TrainConfig, model: torch.nn.Module, url: str, receiver: str) -> None:
    """Raise ``ValueError`` unless the server's parameters are the trainer's."""
    weights = hf_weights(config, model)
    if receiver == "stand-in":
        sums = ask(f"{url}/sums")
        expected = {name: byte_sum(values) for name, values in weights.iterate()}
    else:
        sums = ask(f"{url}/weight_checker", b'{"action": "checksum"}')["checksums"]
        tensors = {name: values.cpu() for name, values in weights.iterate()}
        expected = {name: joined_checksum(name.rpartition(":")[2], tensors) for name in sums}
    if expected != sums:
        wrong = [name for name in sums if sums[name] != expected.get(name)]
        raise ValueError(f"the server has other weights than the trainer: {len(wrong)} of {len(sums)}: {wrong[:3]}")


def joined_checksum(name: str, tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of a parameter of vLLM without tensor parallelism."""
    for joined, parts in JOINED.items():
        if f".{joined}." in name:
            return joined_checksum("", {"": torch.cat([tensors[name.replace(joined, part)] for part in parts])})
    return hashlib.sha256(tensors[name].contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def ask(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return parse_json(reply.read())


def measure(arguments: argparse.Namespace, way: str, model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """Medians over the updates of a new server."""
    config = run_config(arguments, way)
    server = stand_in(device) if arguments.receiver == "stand-in" else vllm_server(config.model, arguments.vllm_flags)
    with server as url:
        protocol = TimedProtocol(way)
        writer, engine = rollout_weights(config, model), HttpEngine(protocol, [url], report=print)
        write, update = [], []
        for version in range(1 + arguments.repeats):
            begin = time.perf_counter()
            weights = writer.write(version)
            written = time.perf_counter()
            engine.update_weights(version, weights)
            update.append(time.perf_counter() - written)
            write.append(written - begin)
            writer.delete_before(version)
        engine.close()
        writer.close()
        check_values(config, model, url, arguments.receiver)
    return {
        "write_s": median(write[1:]),
        "update_s": median(update[1:]),
        "pause_s": median(protocol.pauses[1:]),
        "first_write_s": write[0],
        "first_update_s": update[0],
    }


def main() -> None:
    """Measure every way."""
    arguments = parse_arguments()
    if arguments.repeats < 1:
        raise InputError(f"--repeats must be at least 1, not {arguments.repeats}")
    device = initialize_parallel(0)
    if device.type != "cuda" and "ipc" in arguments.ways:
        raise InputError("--ways ipc needs a GPU; give --ways folder")
    if device.type != "cuda" and arguments.receiver == "vllm":
        raise InputError("--receiver vllm needs a GPU; leave it out")
    model = build_model(run_config(arguments, "folder").model, device).eval()
    num_bytes = sum(values.nbytes for _, values in hf_weights(run_config(arguments, "folder"), model).iterate())
    settings = {name: getattr(arguments, name) for name in ("shape", "receiver", "repeats", "folder")}
    report = Report("update of a server's weights", settings, device, arguments.output)
    for way in arguments.ways:
        report.add({"way": way, "bytes": num_bytes, **measure(arguments, way, model, device)})


if __name__ == "__main__":
    run_entry_point(main)
