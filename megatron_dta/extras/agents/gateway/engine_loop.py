"""Runs a rollout engine for requests that come from other threads, and in step on all ranks of a replica.

    server's thread                      engine's thread (first rank)          other ranks of the replica
    sample(...)  -> queue of commands -> take what has come
                                         share it  ------------------------->  receive it
                                         submit, release, poll                 submit, release, poll
    future       <---------------------- results

An engine is called from one thread only, and all ranks of a replica make the same calls in the same order. ``poll``
waits until a request has finished, so a request that comes meanwhile waits as long; answers are therefore sampled in
pieces of a few tokens (``answers.py``).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from megatron_dta.common.futures import complete
from megatron_dta.core.model.parallel.mesh import Mesh, current_mesh
from megatron_dta.extras.agents.gateway.errors import RequestError
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, RolloutEngine

_IDLE_S = 0.02


@dataclass
class _Commands:
    """What all ranks do next."""

    submit: list[GenerationRequest] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    ends: bool = False


class EngineLoop:
    """Samples pieces of answers.

    Args:
        engine: started by the caller before ``run`` (``sampling.interface.phase``).
        mesh: returns the mesh of the thread that calls ``run``.
    """

    def __init__(self, engine: RolloutEngine, mesh: Callable[[], Mesh] = current_mesh) -> None:
        self._engine, self._mesh = engine, mesh
        self._queue: queue.Queue[tuple[str, object]] = queue.Queue()
        self._futures: dict[int, Future[GenerationResult]] = {}
        self._next_id = 0
        self._held: set[int] = set()

    def sample(self, request: GenerationRequest) -> Future[GenerationResult]:
        """Submit a request, whose id the loop chooses, from any thread. Its K/V is held until ``release``."""
        future: Future[GenerationResult] = Future()
        self._queue.put(("sample", (request, future)))
        return future

    def release(self, request_id: int) -> None:
        """Release the K/V of a finished request, from any thread; ids of an earlier ``run`` are ignored."""
        self._queue.put(("release", request_id))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Serve requests until ``is_over``; it is asked on the first rank only. Requests that are left then fail."""
        mesh = self._mesh()
        try:
            while True:
                collected = self._collect(is_over) if mesh.is_first_of_replica else None
                commands = mesh.from_first_of_replica(collected)
                if commands.ends:
                    return
                self._work(commands)
        finally:
            self._end()

    def _collect(self, is_over: Callable[[], bool]) -> _Commands:
        """The commands that have come; waits a moment for the first one if nothing is running."""
        commands, waits = _Commands(), not self._futures
        while True:
            try:
                kind, value = self._queue.get(timeout=_IDLE_S) if waits else self._queue.get(False)
            except queue.Empty:
                commands.ends = waits and not commands.submit and is_over()
                return commands
            waits = False
            if kind == "release":
                if value in self._held:
                    self._held.discard(value)
                    commands.release.append(value)
                continue
            request, future = value
            if future.cancelled():
                continue
            request = replace(request, request_id=self._next_id, hold=True)
            if request.parent is not None and (request.parent not in self._held or request.parent in commands.release):
                request = replace(request, parent=None)
            self._futures[self._next_id] = future
            self._next_id += 1
            commands.submit.append(request)

    def _work(self, commands: _Commands) -> None:
        for request in commands.submit:
            try:
                self._engine.submit([request])
            except ValueError as error:
                future = self._futures.pop(request.request_id, None)
                if future is not None:
                    complete(future, error=RequestError(400, str(error)))
        if commands.release:
            self._engine.release(commands.release)
        for result in self._engine.poll():
            self._held.add(result.request_id)
            future = self._futures.pop(result.request_id, None)
            if future is not None and not complete(future, result):
                # Nobody waits for it any more.
                self.release(result.request_id)

    def _end(self) -> None:
        """Fail what is left; the engine releases what it holds when it is started again."""
        futures, self._futures = self._futures, {}
        self._held.clear()
        while True:
            try:
                kind, value = self._queue.get(False)
            except queue.Empty:
                break
            if kind == "sample":
                futures[-1 - len(futures)] = value[1]
        for future in futures.values():
            complete(future, error=RequestError(503, "the gateway samples no more at present"))
