"""Weights over NCCL between two GPUs, received as by vLLM and SGLang, also with a receiver that is gone."""

import base64
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_dta.extras.servers.weights.groups import NcclGroup, StoreGroup
from megatron_dta.sampling.host_weights import empty_weights

pytestmark = pytest.mark.two_gpus
SHAPES = {f"layer{i}": ((4096, 4096), torch.bfloat16) for i in range(32)} | {"odd": ((7, 3), torch.float32)}
COMMON = """
import base64, json, os, sys, time
import torch
from datetime import timedelta
torch.cuda.set_device(1)
meeting, sizes, stops = json.loads(sys.argv[1])
"""
# What vLLM's communicator does with a unique id (tests/servers has vLLM itself), and SGLang with a store.
JOIN = {
    "vllm": """
from nccl import core as nccl
unique_id = nccl.UniqueId.from_bytes(base64.b64decode(meeting["unique_id"]))
communicator = nccl.Communicator.init(2, 1, unique_id)
number = torch.zeros(1, device="cuda")
communicator.allreduce(number, number, nccl.SUM)
torch.cuda.synchronize()
def receive(buffer):
    communicator.broadcast(buffer, buffer, root=0)
""",
    "sglang": """
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
address = f"tcp://{meeting['address']}:{meeting['port']}"
store, rank, size = next(dist.rendezvous(address, 1, 2, timeout=timedelta(seconds=60)))
store = dist.PrefixStore(meeting["name"], store)
group, _ = c10d._new_process_group_helper(size, rank, [], dist.Backend("nccl"), store, group_name=meeting["name"],
                                          timeout=timedelta(seconds=60))
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
def receive(buffer):
    dist.broadcast(buffer, src=0, group=group)
""",
}
RECEIVE = """
sums = []
for size in sizes:
    if len(sums) == stops:
        os._exit(0)
    buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
    receive(buffer)
    torch.cuda.synchronize()
    sums.append(int(buffer.long().sum()))
print(json.dumps(sums), flush=True)
os._exit(0)
"""


def start(
    kind: str, folder: Path, sizes: list[int], stops: int = -1
) -> tuple[StoreGroup | NcclGroup, subprocess.Popen]:
    device = torch.device("cuda", 0)
    group = NcclGroup(2, 20, device) if kind == "vllm" else StoreGroup(2, "http://127.0.0.1:9", 20, device)
    meeting = {"address": group.meeting.address, "port": group.meeting.port, "name": group.meeting.name}
    if group.meeting.unique_id is not None:
        meeting["unique_id"] = base64.b64encode(group.meeting.unique_id).decode()
    argument = json.dumps([meeting, sizes, stops])
    command = [sys.executable, "-c", COMMON + JOIN[kind] + RECEIVE, argument, str(folder / "store")]
    return group, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_every_byte_arrives(kind: str, tmp_path: Path) -> None:
    weights = empty_weights(SHAPES, 256 << 20, pinned=True)
    for values in weights.tensors.values():
        values.copy_(torch.randn(values.shape))
    group, other = start(kind, tmp_path, [bucket.buffer.numel() for bucket in weights.buckets])
    group.join()
    begin = time.perf_counter()
    group.broadcast_all([bucket.buffer for bucket in weights.buckets])
    seconds = time.perf_counter() - begin
    output, _ = other.communicate(timeout=60)
    assert json.loads(output) == [int(bucket.buffer.long().sum()) for bucket in weights.buckets]
    gib = sum(bucket.buffer.numel() for bucket in weights.buckets) / 2**30
    print(f"{kind}: {gib:.2f} GiB in {seconds:.2f} s")
    group.abort()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_receiver_that_is_gone_does_not_end_the_trainer(kind: str, tmp_path: Path) -> None:
    weights = empty_weights(SHAPES, 256 << 20)
    group, other = start(kind, tmp_path, [bucket.buffer.numel() for bucket in weights.buckets], stops=1)
    group.join()
    group.broadcast(weights.buckets[0].buffer)
    other.wait(60)
    with pytest.raises((TimeoutError, RuntimeError)):
        group.broadcast_all([bucket.buffer for bucket in weights.buckets[1:]])
    group.abort()
    # The device still works.
    assert float((torch.ones(8, device="cuda:0") * 2).sum()) == 16
    torch.cuda.synchronize(0)
