"""A page in a real browser without a window: what it shows, and all that it complains about.

Chromium is spoken to over two pipes (``--remote-debugging-pipe``: JSON messages that end with a zero byte), which needs
neither a port nor a package. Where no Chromium is installed, tests skip and say so.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str:
    """The browser's path; skips the test where there is none."""
    wanted = os.environ.get("DTA_BROWSER")
    found = shutil.which(wanted) if wanted else next((p for name in NAMES if (p := shutil.which(name))), None)
    if found is None:
        pytest.skip("no browser: install chromium, or let DTA_BROWSER name one")
    return found


class Page:
    """One page, loaded from a file, with network events and the console recorded.

    Attributes:
        complaints: errors and warnings of the console, exceptions, blocked or failed requests.
        requests: URLs that were asked for, the page's own among them.
    """

    def __init__(self, path: Path, width: int = 1250, height: int = 1000) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._number, self._buffer = 0, b""
        self._profile = tempfile.TemporaryDirectory(prefix="dta-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [
            find_browser(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--window-size={width},{height}",
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # Out of the way of 3 and 4, from which the browser reads and to which it writes.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in (to_read, to_write)]

        def connect() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            command, preexec_fn=connect, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for descriptor in (*high, to_read, to_write):
            os.close(descriptor)
        try:
            target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
            attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
            self._session: str | None = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
            self._loaded = False
            self._call("Page.navigate", {"url": path.resolve().as_uri()})
            deadline = time.monotonic() + 60
            while not self._loaded:
                self._message(deadline)
        except BaseException:
            self.close()
            raise

    _session: str | None = None
    _loaded = False

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON would have it."""
        found = self._call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        found = self._call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End the browser."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for descriptor in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._profile.cleanup()

    def _call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise AssertionError("the browser has ended or does not answer")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, parameters: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Network.loadingFailed":
            self.complaints.append(f"a request failed: {parameters.get('errorText')}")
        elif event == "Log.entryAdded":
            self.complaints.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console.{parameters['type']}: {parameters['args']}")
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {parameters['exceptionDetails']}")
