"""The processes in which ranks are tested: their groups do what Gloo's do, and ranks that wait for ever are named."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import mesh_worker
from mesh_worker import run_on_ranks


def call_all(rank: int, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """The results of all collectives, of messages whose receives are waited for in any order, and in a part of ranks.

    Sums are of small integers, so that all orders give the same.
    """
    size, found = 3, []
    part = distributed.new_group([0, 2])
    for dtype in dtypes:
        own = (torch.arange(12) % 5 + rank).reshape(6, 2).to(dtype)
        for kind in (distributed.ReduceOp.SUM, distributed.ReduceOp.MAX, distributed.ReduceOp.MIN):
            found.append(own.clone())
            distributed.all_reduce(found[-1], kind)
        lists = [torch.empty_like(own) for _ in range(size)]
        distributed.all_gather(lists, own)
        single, piece = own.new_empty(18, 2), own.new_empty(2, 2)
        gathering = distributed.all_gather_into_tensor(single, own, async_op=True)
        distributed.reduce_scatter_tensor(piece, own)
        gathering.wait()
        sizes = [[1, 2, 3], [0, 4, 2], [6, 0, 0]]
        received = own.new_empty(sum(row[rank] for row in sizes), 2)
        distributed.all_to_all_single(received, own, [row[rank] for row in sizes], sizes[rank])
        news, root_only = own.clone(), own.clone()
        distributed.broadcast(news, 1)
        distributed.reduce(root_only, 2)
        found += [*lists, single, piece, received, news, *([root_only] if rank == 2 else [])]
        if rank != 1:
            found.append(own.clone())
            distributed.all_reduce(found[-1], group=part)
        letters = [torch.empty_like(own) for _ in range(2)]
        sent = [distributed.isend(number * own, (rank + 1) % size) for number in (1, 2)]
        expected = [distributed.irecv(letter, (rank - 1) % size) for letter in letters]
        for work in (*reversed(expected), *sent):
            work.wait()
        found += letters
    objects: list[Any] = [None] * size
    distributed.all_gather_object(objects, {"rank": rank})
    scattered = [None]
    distributed.scatter_object_list(scattered, ["a", "b", "c"] if rank == 0 else None)
    distributed.gather_object(scattered[0], together := [None] * size if rank == 1 else None, dst=1)
    return [*found, objects, scattered, together]


def test_groups_on_sockets_do_what_those_on_gloo_do(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.int64]
    found, expected = (run_on_ranks(call_all, dtypes, 3, tmp_path / name, name) for name in ("sockets", "gloo"))
    for one, other in zip(found, expected, strict=True):
        for own, wanted in zip(one, other, strict=True):
            assert torch.equal(own, wanted) if isinstance(own, torch.Tensor) else own == wanted


def send_much(rank: int, _: None) -> bool:
    """More than any buffer takes, in both directions before either rank reads."""
    own, other = torch.full((3_000_000,), float(rank)), torch.empty(3_000_000)
    works = [distributed.isend(own, 1 - rank), distributed.irecv(other, 1 - rank)]
    for work in works:
        work.wait()
    return bool((other == 1 - rank).all())


def test_large_messages_cross(tmp_path: Path) -> None:
    assert run_on_ranks(send_much, None, 2, tmp_path) == [True, True]


def call_others(rank: int, _: None) -> None:
    (distributed.all_reduce if rank else distributed.broadcast)(torch.zeros(3), **({} if rank else {"src": 1}))


def call_with_others(rank: int, _: None) -> None:
    distributed.all_reduce(torch.zeros(3 + rank))


def end_early(rank: int, _: None) -> None:
    if rank:
        os._exit(0)
    distributed.all_reduce(torch.zeros(3))


@pytest.mark.parametrize(
    ("on_rank", "words"),
    [
        (call_others, "of the group calls"),
        (call_with_others, "ranks have tensors of different sizes"),
        # Noticed where rank 0 sends, or where it reads.
        (end_early, "Connection closed by peer: rank 1"),
    ],
)
def test_ranks_that_do_not_fit_fail(on_rank: Callable, words: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=words):
        run_on_ranks(on_rank, None, 2, tmp_path)


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
