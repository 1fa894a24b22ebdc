"""A reward server on the loopback that answers as a test asks it to."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RewardServer:
    """Answers each request with the next plan; the last one stays.

    Plans: a dictionary or number (JSON), bytes (as they are), ("status", code), "hang", "cut", "drop", "gzip", and what
    comes a bit at a time: "drip" (the body), "continue" (interim replies without end).

    Attributes:
        url: where it is.
        bodies: what it was sent.
    """

    def __init__(self, *plans: Any, hang_s: float = 2.0) -> None:
        self.plans, self.bodies, self._lock = list(plans), [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with outer._lock:
                    outer.bodies.append(request := json.loads(body))
                    plan = outer.plans.pop(0) if len(outer.plans) > 1 else outer.plans[0]
                if callable(plan):
                    plan = plan(request)
                self._answer(plan)

            def _answer(self, plan: Any) -> None:
                if plan == "drop":
                    self.close_connection = True
                    return
                if plan == "hang":
                    time.sleep(hang_s)
                if plan == "continue":
                    self._drip(b"HTTP/1.1 100 Continue\r\n\r\n")
                    return
                status = plan[1] if isinstance(plan, tuple) else 200
                content = (
                    plan
                    if isinstance(plan, bytes)
                    else json.dumps({} if isinstance(plan, (tuple, str)) else plan).encode()
                )
                self.send_response(status)
                self.send_header("Content-Length", str(len(content) + (50 if plan in ("cut", "drip") else 0)))
                if plan == "gzip":
                    self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                self.wfile.write(content)
                if plan == "drip":
                    self._drip(b" ")

            def _drip(self, part: bytes) -> None:
                for _ in range(40):
                    self.wfile.write(part)
                    self.wfile.flush()
                    time.sleep(0.1)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                pass  # a client that has given up

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/score?x=1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> RewardServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
