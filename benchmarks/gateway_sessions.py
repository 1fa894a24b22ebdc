"""Measures the gateway with many sessions, of whose calls some are cancelled, sent again or have an edited history.

    python benchmarks/gateway_sessions.py [--sessions 2000] [--calls 20] [--at-once 100] [--percent 5]
        [--output FILE.json]
    python benchmarks/gateway_sessions.py --sessions 8 --calls 6 --at-once 4 --load-hf MODEL --tokenizer-type \
        HuggingFaceTokenizer --tokenizer-model MODEL --rollout-max-response-len 64 [--bf16]

Without --load-hf the answers are scripted, 5 ms for up to 32 tokens of all that are sampled at the time; with it they
are those of the engine in this process. The clients are another process. After each wave of --at-once sessions all of
them are closed and checked: every answer that a client has read is in the session's file, as the engine sampled it, and
trained once; no text was tokenized twice behind the same tokens; the engine holds nothing. "other_seconds" are those of
a call besides the engine's: of the gateway, of HTTP and of the client.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.report import Report
from common.servers.gateway_clients import ADMIN_KEY, Seen, run_clients
from common.servers.gateway_recording import CountingPrompts, RecordingLoop, ScriptedEngine, digest
from megatron_dta.commands.servers import gateway as command
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import alone
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.agents.gateway.gateway import Gateway
from megatron_dta.extras.agents.gateway.http.application import Administration, Application
from megatron_dta.extras.agents.gateway.http.server import GatewayServer
from megatron_dta.extras.agents.gateway.session import Session
from megatron_dta.extras.agents.gateway.session_log import SessionLog
from megatron_dta.extras.agents.gateway.sessions import GatewaySettings
from megatron_dta.sampling.interface import RolloutEngine, phase
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.training.config import AgentConfig

# The tests' tokenizer and template, which writes tools and drops the reasoning of earlier turns.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from open_gateway import AGENT_TEMPLATE, chat_tokenizer


def parse_arguments() -> tuple[argparse.Namespace, Any]:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=20, help="of a session, without those that are sent twice")
    parser.add_argument("--at-once", type=int, default=100, help="sessions of a wave")
    parser.add_argument("--percent", type=float, default=5.0, help="of the calls, for each of the three")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments, others = parser.parse_known_args()
    for name in ("sessions", "calls", "at_once"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    return arguments, command.FLAGS.parse(others)[0] if others else None


@dataclass
class Served:
    """A gateway that serves, and the sessions of the wave that were closed."""

    gateway: Gateway
    loop: RecordingLoop
    url: str
    engine_thread: threading.Thread
    sessions: list[Session] = field(default_factory=list)
    log: SessionLog | None = None


@contextlib.contextmanager
def served(folder: Path, config: Any) -> Iterator[Served]:
    """The gateway on the scripted engine or that of the flags."""
    if config is None:
        tokenizer, most, agent = chat_tokenizer(folder / "model"), (512, 32_768), AgentConfig(gateway_max_calls=10**6)
        engine: RolloutEngine = ScriptedEngine(tokenizer)
    else:
        shutil.copytree(
            config.sampling.tokenizer_model, folder / "model", ignore=shutil.ignore_patterns("*.safetensors")
        )
        (folder / "model" / "chat_template.jinja").write_text(AGENT_TEMPLATE, encoding="utf-8")
        tokenizer, agent = HuggingFaceTokenizer(folder / "model"), config.agent
        most = (config.sampling.rollout_max_response_len, config.model.max_position_embeddings)
        engine = command._engine(config, tokenizer)
    params, loop = SamplingParams(most[0], tokenizer.eos_id), RecordingLoop(engine)
    settings = GatewaySettings(agent, "policy", most[1], 10**6)
    gateway = Gateway(loop, tokenizer, ChatTemplate(folder / "model"), params, settings)
    gateway.prompts = CountingPrompts(tokenizer, ChatTemplate(folder / "model"), most[1] - 1, 10**9)
    gateway.prompts.texts = Counter()
    numbers = iter(range(10**9))

    def opened(group_id: str) -> tuple[str, str]:
        session, key = gateway.sessions.open(next(numbers), group_id)
        return session.session_id, key

    def closed(session: Session, failed: bool) -> None:
        gateway.close(session)
        result.log.close_session(session, failed)
        result.sessions.append(session)

    server = GatewayServer(Application(gateway, Administration(ADMIN_KEY, opened, closed)).asgi(), "127.0.0.1", 0)
    over = threading.Event()

    def run() -> None:
        with alone() if config is None else contextlib.nullcontext(), phase(engine, params, 0):
            loop.run(over.is_set)

    thread = threading.Thread(target=run, daemon=True)
    result = Served(gateway, loop, server.url, thread)
    thread.start()
    try:
        yield result
    finally:
        server.close()
        over.set()
        thread.join()
        engine.close()


def check_wave(wave: Served, file: Path, seen: Seen) -> Counter[str]:
    """Counts of a wave's sessions; ``RuntimeError`` if anything is lost, doubled or altered."""
    trained: dict[str, Counter[bytes]] = {}
    sequences: dict[str, list[np.ndarray]] = {}
    for rollout in load_rollouts(file):
        runs = np.flatnonzero(np.diff(rollout.loss_mask, prepend=0, append=0)).reshape(-1, 2).tolist()
        pieces = [digest(rollout.token_ids[a:b].tobytes(), rollout.logprobs[a:b].tobytes()) for a, b in runs]
        trained.setdefault(rollout.trajectory_id, Counter()).update(pieces)
        sequences.setdefault(rollout.trajectory_id, []).append(rollout.token_ids)
    begun: dict[bytes, list[tuple[list[int], list[float]]]] = {}
    for prompt, ids, logprobs in wave.loop.answers.values():
        begun.setdefault(prompt, []).append((ids, logprobs))
    counts, ids_of_calls = Counter(sessions=len(wave.sessions), cancelled=seen.cancelled), []
    for session in wave.sessions:
        sampled: Counter[bytes] = Counter()
        for call in session.calls:
            prompt, answer = digest(call.token_ids(call.prompt_length).tobytes()), call.output.tolist()
            match = next((entry for entry in begun.get(prompt, ()) if entry[0] == answer), None)
            check(match is not None, "a call is not what the engine sampled for its prompt")
            begun[prompt].remove(match)
            sampled[digest(call.output.tobytes(), np.array(match[1], np.float32).tobytes())] += 1
            counts["trained_tokens"] += len(answer)
        check(sampled == trained.get(session.session_id), "an answer is not in the file once")
        counts["calls"] += len(session.calls)
        counts["abandoned"] += session.counts.abandoned_calls
        counts["branches"] += len(session.branches)
        counts["stored_tokens"] += session.num_tokens
        counts["distinct_tokens"] += build_prefix_tree(sequences[session.session_id]).num_tokens
        counts.update(f"branches_{reason}" for reason in session.branches.values())
        ids_of_calls += [call.call_id for call in session.calls]
    left = [ids for entries in begun.values() for ids, _ in entries]
    counts["abandoned_tokens"] = sum(map(len, left))
    check(len(left) == counts["abandoned"], "answers that the engine began are neither calls nor abandoned")
    check(set(seen.ids) <= set(ids_of_calls), "an answer that a client has read is not recorded")
    check(len(ids_of_calls) + len(left) == len(seen.ids) + seen.cancelled, "there are more answers than requests")
    check(max(wave.gateway.prompts.texts.values()) == 1, "a text was tokenized twice behind the same tokens")
    return counts


def check(is_right: bool, message: str) -> None:
    if not is_right:
        raise RuntimeError(message)


def settled(loop: RecordingLoop) -> float:
    """Seconds until the engine holds nothing any more, at most 10."""
    began = time.perf_counter()
    while not loop.is_empty:
        check(time.perf_counter() < began + 10, "the engine still holds what sessions had that are closed")
        time.sleep(0.01)
    return time.perf_counter() - began


def core_seconds(engine: threading.Thread) -> float:
    """Processor time of this process without the engine's thread."""
    return time.process_time() - time.clock_gettime(time.pthread_getcpuclockid(engine.ident))


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def run_waves(arguments: argparse.Namespace, wave: Served, pipe: Connection, folder: Path) -> dict:
    """All sessions; the results."""
    total: Counter[str] = Counter()
    wall = core = 0.0
    seconds: list[np.ndarray] = []
    resident = []
    for number, first in enumerate(range(0, arguments.sessions, arguments.at_once)):
        file = folder / f"wave{number}.jsonl"
        wave.log = SessionLog(file)
        began, cores = time.perf_counter(), core_seconds(wave.engine_thread)
        pipe.send((first, min(first + arguments.at_once, arguments.sessions)))
        seen = pipe.recv()
        wall, core = wall + time.perf_counter() - began, core + core_seconds(wave.engine_thread) - cores
        settled(wave.loop)
        wave.log.close()
        total += check_wave(wave, file, seen)
        seconds.append(np.array(seen.seconds, np.float32))
        file.unlink()
        wave.sessions.clear()
        wave.loop.answers.clear()
        wave.gateway.prompts.texts.clear()
        gc.collect()
        resident.append(round(resident_mib(), 1))
        print(f"{total['sessions']} sessions, {total['calls']} calls, {resident[-1]} MiB", flush=True)
    check(len(wave.gateway.sessions) == 0, "sessions are open")
    turns, times = np.concatenate(seconds).T
    few = max(1, arguments.calls // 10)
    answered = total["calls"] + total["abandoned"]
    engine = wave.loop.seconds / answered
    return {
        **total,
        "tokenized_twice": 0,  # or ``check_wave`` raises
        "seconds": wall,
        "calls_per_second": answered / wall,
        "core_ms_per_call": 1e3 * core / answered,
        "latency_s": float(times.mean()),
        "latency_p50_s": float(np.quantile(times, 0.5)),
        "latency_p99_s": float(np.quantile(times, 0.99)),
        "latency_first_turns_s": float(np.median(times[turns < few])),
        "latency_last_turns_s": float(np.median(times[turns >= arguments.calls - few])),
        "engine_s": engine,
        "other_seconds": float(times.mean()) - engine,
        "other_share": 1 - engine / float(times.mean()),
        "resident_mib": resident,
    }


def main() -> None:
    """Serve the waves and report."""
    arguments, config = parse_arguments()
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    settings["engine"] = "scripted" if config is None else config.checkpoint.load_hf or config.checkpoint.load
    report = Report(
        "sessions at the gateway",
        settings,
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        arguments.output,
    )
    # Forked before the gateway's threads start.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    clients = context.Process(target=run_clients, args=(theirs, arguments), daemon=True)
    clients.start()
    theirs.close()
    with tempfile.TemporaryDirectory() as name, served(Path(name), config) as wave:
        ours.send(wave.url)
        ours.recv()
        try:
            report.add({"what": "sessions", **run_waves(arguments, wave, ours, Path(name))})
        finally:
            with contextlib.suppress(OSError):
                ours.send(None)
            clients.join(10)


if __name__ == "__main__":
    run_entry_point(main)
