"""A stand-in for a vLLM server that takes weights and samples nothing; runs in a process of its own.

Like vLLM it copies what arrives into parameters that it keeps: from the trainer's buffer on the GPU (the ``ipc`` engine
of weight transfer, each tensor copied out before it is loaded), or from the files of a folder. GET /sums returns a sum
over the bytes of every parameter.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor


class Receiver:
    """The endpoints; handlers block, since one trainer asks one thing after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parameters: dict[str, Tensor] = {}
        self._label = ""
        self._mapped: tuple[tuple[Any, ...], Tensor] | None = None

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        posts = {
            "/pause": self._nothing, "/resume": self._nothing, "/update_weights": self._update,
            "/finish_weight_update": self._finish, "/collective_rpc": self._reload,
            "/update_weight_version": self._set_label, "/init_weight_transfer_engine": self._nothing,
            "/start_weight_update": self._nothing, "/reset_prefix_cache": self._nothing,
        }  # fmt: skip
        gets = {
            "/health": lambda: {}, "/get_world_size": lambda: {"world_size": 1},
            "/weight_info": lambda: {"weight_version": self._label}, "/sums": self._sums,
        }  # fmt: skip
        for path, answer in posts.items():
            app.router.add_post(path, _posted(answer))
        for path, answer in gets.items():
            app.router.add_get(path, _got(answer))
        return app

    def _nothing(self, body: Any) -> None:
        del body

    def _set_label(self, body: dict[str, Any]) -> None:
        self._label = body["new_version"]

    def _update(self, body: dict[str, Any]) -> None:
        info = body["update_info"]
        (handle,) = pickle.loads(base64.b64decode(info["ipc_handles_pickled"])).values()
        arguments = (*handle[:6], self._device.index, *handle[7:])
        if self._mapped is None or self._mapped[0] != arguments:
            self._mapped = arguments, rebuild_cuda_tensor(*arguments)
        start = 0
        for name, dtype, shape, size in zip(
            info["names"], info["dtype_names"], info["shapes"], info["tensor_sizes"], strict=True
        ):
            part = self._mapped[1][start : start + size].clone()
            self._load(name, part.view(getattr(torch, dtype)).view(shape))
            start += size
        torch.cuda.synchronize()

    def _finish(self, body: Any) -> None:
        del body
        self._mapped = None

    def _reload(self, body: dict[str, Any]) -> None:
        for file in sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors")):
            with safe_open(file, "pt", device=str(self._device)) as opened:
                for name in sorted(opened.keys()):
                    self._load(name, opened.get_tensor(name))
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _load(self, name: str, values: Tensor) -> None:
        if name not in self._parameters:
            self._parameters[name] = torch.empty_like(values)
        self._parameters[name].copy_(values)

    def _sums(self) -> dict[str, int]:
        return {name: byte_sum(values) for name, values in self._parameters.items()}


def byte_sum(values: Tensor) -> int:
    """A sum over the bytes of a tensor, in pairs, each weighted by its place modulo a prime."""
    pairs = values.detach().contiguous().view(-1).view(torch.int16).long()
    return int((pairs * (torch.arange(len(pairs), device=pairs.device) % 8191 + 1)).sum())


def _posted(answer: Any) -> Any:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json() if request.can_read_body else None) or {})

    return handle


def _got(answer: Any) -> Any:
    async def handle(request: web.Request) -> web.Response:
        del request
        return web.json_response(answer())

    return handle


def receive(device: torch.device, told: Connection) -> None:
    """Send the URL of a free port, and serve there until the process is ended."""
    asyncio.run(_serve(device, told))


async def _serve(device: torch.device, told: Connection) -> None:
    runner = web.AppRunner(Receiver(device).application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    told.send(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    await asyncio.Event().wait()
