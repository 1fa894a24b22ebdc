"""Weights that another process on the same GPU copies out of the trainer's buffer, as vLLM's IPC engine does."""

import base64
import pickle
import subprocess
import sys

import torch

from megatron_dta.extras.servers.weights.groups import SharedBuffer
from megatron_dta.sampling.host_weights import empty_weights

SHAPES = {f"layer{i}": ((1024, 1024), torch.bfloat16) for i in range(32)} | {"odd": ((7, 3), torch.float32)}
READER = """
import base64, pickle, sys
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
known = None
for line in sys.stdin:
    size, handles = pickle.loads(base64.b64decode(line))
    if handles != known:
        # An update is opened once.
        known, mapped = handles, None
        arguments = list(handles[str(torch.cuda.get_device_properties(0).uuid)])
        arguments[6] = 0
        mapped = rebuild_cuda_tensor(*arguments)
    print(int(mapped[:size].clone().long().sum()), flush=True)
"""


def test_every_bucket_is_read_as_it_was_staged() -> None:
    weights = empty_weights(SHAPES, 8 << 20, pinned=True)
    group = SharedBuffer(2, [torch.device("cuda", 0)])
    group.reserve(max(bucket.buffer.numel() for bucket in weights.buckets))
    group.join()
    command = [sys.executable, "-c", READER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        # The second update maps the same buffer again.
        for _ in range(3):
            group.begin()
            for values in weights.tensors.values():
                values.copy_(torch.randn(values.shape))
            for bucket in weights.buckets:
                group.stage(bucket.buffer)
                told = pickle.dumps((bucket.buffer.numel(), group.meeting.handles))
                other.stdin.write(base64.b64encode(told).decode() + "\n")
                other.stdin.flush()
                assert int(other.stdout.readline()) == int(bucket.buffer.long().sum())
        other.stdin.close()
    group.abort()
