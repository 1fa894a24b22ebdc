"""The processes in which ranks are tested: those that wait for ever are ended and say where they were."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

import mesh_worker
from mesh_worker import run_on_ranks


def wait_for_ever(rank: int, _: None) -> None:
    """As with Gloo, threads that look for messages use as much processor time together as a slow rank."""
    if rank == 0:
        for _ in range(15):
            threading.Thread(target=look_for_ever, daemon=True).start()
        distributed.recv(torch.empty(1), 1)
    time.sleep(60)


def look_for_ever() -> None:
    while True:
        sum(range(2000))
        time.sleep(0.002)


def test_ranks_that_wait_for_ever_are_ended_and_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_worker, "STALLED_S", 4)
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] gave no result, none made progress for 4 s") as raised:
        run_on_ranks(wait_for_ever, None, 2, tmp_path)
    text = str(raised.value)
    assert "rank 0 was here" in text
    assert text.count("in wait_for_ever") == 2
