"""Serves an ASGI application with uvicorn in a thread of its own."""

from __future__ import annotations

import importlib.util
import resource
import socket
import threading
import time
from typing import Any

from megatron_dta.core.common.errors import InputError

_SECONDS_TO_STOP = 10.0


def check_packages(flag: str) -> None:
    """``InputError`` if the packages of the server are not installed; ``flag`` needs them."""
    missing = [name for name in ("uvicorn", "starlette", "pydantic") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f'{flag} needs the package {missing[0]}: pip install "megatron_dta[servers]"')


class GatewayServer:
    """A server that listens from its creation until ``close``.

    Args:
        port: 0 for any free one.
        max_connections: with requests at work; further requests are answered with status 503. At most half of the files
            that the process may open.

    Attributes:
        url: without a path.
    """

    def __init__(self, application: Any, host: str, port: int, max_connections: int = 2048) -> None:
        import uvicorn

        max_connections = min(max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise InputError(f"--gateway-host {host}:{port}: cannot be listened on ({error.strerror})") from error
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            limit_concurrency=max_connections,
            h11_max_incomplete_event_size=64 * 1024,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            http="h11",
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _SECONDS_TO_STOP
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self._server.started:
            raise RuntimeError("the gateway's server has not started")

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def close(self) -> None:
        """Stop listening and end all connections. May be called twice."""
        self._server.should_exit = True
        self._thread.join(_SECONDS_TO_STOP)
        self._socket.close()
