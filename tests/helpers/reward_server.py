"""A reward server on the loopback that answers as a test asks it to."""

import json
import time
from collections.abc import Iterator
from typing import Any

from raw_server import RawRequest, RawServer, reply


class RewardServer(RawServer):
    """Answers each request with the next plan; the last one stays.

    Plans: a dictionary or number (JSON), bytes (as they are), ("status", code), "hang", "drop", and what
    comes a bit at a time: "drip" (the body), "continue" (interim replies without end).

    Attributes:
        bodies: what it was sent.
    """

    def __init__(self, *plans: Any, hang_s: float = 2.0) -> None:
        self.plans, self.bodies, self._hang_s = list(plans), [], hang_s
        super().__init__(self._pieces)
        self.url += "/score?x=1"

    def _pieces(self, request: RawRequest) -> Iterator[bytes]:
        self.bodies.append(body := json.loads(request.body))
        plan = self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]
        if callable(plan):
            plan = plan(body)
        if plan == "drop":
            return
        if plan == "hang":
            time.sleep(self._hang_s)
        if plan == "continue":
            yield from _drip(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        content = {} if isinstance(plan, tuple | str) else plan
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        status = f"{plan[1]} Status" if isinstance(plan, tuple) else "200 OK"
        missing = 50 if plan == "drip" else 0
        whole_reply = reply(content + b" " * missing, status)
        yield whole_reply[: len(whole_reply) - missing]
        if plan == "drip":
            yield from _drip(b" ")


def _drip(part: bytes) -> Iterator[bytes]:
    for _ in range(40):
        yield part
        time.sleep(0.1)
