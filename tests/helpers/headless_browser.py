"""A page in Chromium without a window. Where none is installed, tests skip and say so."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browse(page: Path) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what the console complains about."""
    wanted = os.environ.get("DTA_BROWSER")
    browser = next((path for name in ([wanted] if wanted else NAMES) if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no browser: install chromium, or let DTA_BROWSER name one")
    with tempfile.TemporaryDirectory(prefix="dta-browser-") as profile:
        flags = (
            f"--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --user-data-dir={profile}"
        )
        flags += " --window-size=1250,1000 --enable-logging=stderr --virtual-time-budget=5000 --dump-dom"
        command = [browser, *flags.split(), page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, re.findall(r":CONSOLE:\d+\] (.*)", done.stderr)


def evaluate(page: Path, script: str) -> Any:
    """What the body of an asynchronous JavaScript function returns, as JSON has it, in a copy without policy."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    probe = "<script>(async () => {%s})().then(r => document.body.replaceChildren(JSON.stringify(r)));</script></body>"
    copy = page.with_name(f"probe_{page.name}")
    copy.write_text(text.replace("</body>", probe % script), encoding="utf-8")
    document, complaints = browse(copy)
    assert complaints == []
    return json.loads(html.unescape(re.search("<body>(.*)</body>", document, re.DOTALL)[1]))
