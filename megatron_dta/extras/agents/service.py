"""Runs a batch of agents against the gateway of this replica, with the weights that are being trained.

    thread of the server      answers calls: prompts, trees (``gateway``)
    threads of the agents     one for each run at once (``runs``)
    the caller's thread       runs the engine until the last agent has ended (``engine_loop``)

The first rank of each replica has the server and the agents; the other ranks follow its engine calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dta.common.futures import in_daemon_thread
from megatron_dta.core.model.parallel.mesh import Mesh, current_mesh
from megatron_dta.extras.agents.gateway.engine_loop import EngineLoop
from megatron_dta.extras.agents.gateway.gateway import Gateway
from megatron_dta.extras.agents.gateway.session import Session
from megatron_dta.extras.agents.gateway.sessions import GatewaySettings
from megatron_dta.extras.agents.runs import Agent, AgentAccess, AgentEnd, callable_agent, command_agent, failed_by
from megatron_dta.sampling.interface import RolloutEngine, phase
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.load import Prompt
from megatron_dta.sampling.task import SamplingTask, chat_template
from megatron_dta.training.config import AgentConfig, TrainConfig


@dataclass(frozen=True)
class AgentJob:
    """One run of an agent.

    Attributes:
        number: decides the random numbers of its answers.
    """

    prompt: Prompt
    group_id: str
    number: int


def gateway_settings(config: TrainConfig, max_sessions: int) -> GatewaySettings:
    """The gateway's settings from the flags."""
    name = config.checkpoint.hf_checkpoint or config.checkpoint.load_hf or "policy"
    return GatewaySettings(config.agent, name, config.model.max_position_embeddings, max_sessions)


def load_agent(agent: AgentConfig) -> Agent:
    """The agent of the flags; ``InputError`` if it does not exist or the gateway's packages are missing."""
    from megatron_dta.extras.agents.gateway.http.server import check_packages

    check_packages("--agent-command" if agent.agent_command is not None else "--agent-callable")
    if agent.agent_command is not None:
        return command_agent(agent.agent_command, agent.agent_timeout)
    assert agent.agent_callable is not None  # config.checks
    return callable_agent(agent.agent_callable, agent.agent_timeout)


class AgentService:
    """The gateway of a replica and its agents; created on all ranks, with a server from the first batch on."""

    def __init__(self, engine: RolloutEngine, task: SamplingTask, config: TrainConfig) -> None:
        self._engine, self._task, self._config = engine, task, config
        self._agent = load_agent(config.agent)
        self._loop: EngineLoop | None = None
        self._gateway: Gateway | None = None
        self._server = None
        self._access: Callable[[str], AgentAccess] | None = None

    def run(
        self, jobs: Sequence[AgentJob], params: SamplingParams, iteration: int
    ) -> list[tuple[Session, AgentEnd]] | None:
        """Run the jobs; their sessions, closed, and how they ended, in order; None on other ranks than the first."""
        mesh = current_mesh()
        is_first = mesh.is_first_of_replica
        if self._loop is None:
            self._loop = EngineLoop(self._engine, current_mesh)
            if is_first:
                self._serve(mesh, params)
        if not is_first:
            with phase(self._engine, params, iteration):
                self._loop.run(lambda: True)
            return None
        self._gateway.params = params
        batch = _Batch(jobs, self._run_one, self._config.agent.agent_concurrency)
        with phase(self._engine, params, iteration):
            try:
                self._loop.run(batch.is_over)
            finally:
                batch.stop()
        return batch.results()

    def close(self) -> None:
        """Stop the server. May be called twice."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _serve(self, mesh: Mesh, params: SamplingParams) -> None:
        from megatron_dta.extras.agents.gateway.http.application import Application
        from megatron_dta.extras.agents.gateway.http.server import GatewayServer

        agent = self._config.agent
        settings = gateway_settings(self._config, agent.agent_concurrency)
        template = chat_template(self._config.sampling)
        self._gateway = Gateway(self._loop, self._task.tokenizer, template, params, settings)
        host, port = agent.gateway_address
        self._server = GatewayServer(Application(self._gateway).asgi(), host, port and port + mesh.data_rank)
        url = self._server.url
        self._access = lambda key: AgentAccess(f"{url}/v1", url, f"{url}/v1/session", key)

    def _run_one(self, job: AgentJob) -> tuple[Session, AgentEnd]:
        session, key = self._gateway.sessions.open(job.number, job.group_id)
        try:
            end = self._agent(job.prompt.record, self._access(key))
        except Exception as error:
            end = failed_by(error)
        finally:
            self._gateway.close(session)
        if end.failure is None and not session.calls:
            end = AgentEnd(failure="made no call that was answered")
        return session, end


class _Batch:
    """Agents of a batch in daemon threads, ``concurrency`` at once."""

    def __init__(
        self, jobs: Sequence[AgentJob], run: Callable[[AgentJob], tuple[Session, AgentEnd]], concurrency: int
    ) -> None:
        self._jobs, self._run = jobs, run
        self._results: list[tuple[Session, AgentEnd] | None] = [None] * len(jobs)
        self._waiting, self._lock, self._stops = iter(range(len(jobs))), threading.Lock(), False
        self._workers = [in_daemon_thread(self._work, f"agents {i}") for i in range(min(concurrency, len(jobs)))]

    def _work(self) -> None:
        while not self._stops:
            with self._lock:
                index = next(self._waiting, None)
            if index is None:
                return
            self._results[index] = self._run(self._jobs[index])

    def is_over(self) -> bool:
        """Whether all agents have ended."""
        return all(worker.done() for worker in self._workers)

    def stop(self) -> None:
        """Begin no further agent."""
        self._stops = True

    def results(self) -> list[tuple[Session, AgentEnd]]:
        for worker in self._workers:
            worker.result()
        return [result for result in self._results if result is not None]
