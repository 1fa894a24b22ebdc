"""A server on the loopback whose replies are any bytes, at any time."""

import socketserver
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class RawRequest:
    """A request as it came."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class RawServer:
    """Sends the pieces that ``answer`` gives for a request, and closes the connection.

    Attributes:
        url: without a path.
        requests: those that came.
    """

    def __init__(self, answer: Callable[[RawRequest], Iterable[bytes]]) -> None:
        self.answer, self.requests = answer, []
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    method, target, _ = self.rfile.readline().decode().split(" ")
                    lines = iter(lambda: self.rfile.readline().decode().strip(), "")
                    headers = {
                        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
                    }
                    body = self.rfile.read(int(headers.get("content-length", "0")))
                    outer.requests.append(RawRequest(method, target, headers, body))
                    for piece in outer.answer(outer.requests[-1]):
                        self.wfile.write(piece)
                        self.wfile.flush()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = allow_reuse_address = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> "RawServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def reply(content: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A whole reply."""
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close", *headers])
    return head.encode() + b"\r\n\r\n" + content
