"""Serves a model to agents and records their sessions as rollouts: OpenAI's and Anthropic's interfaces on loopback.

    megatron-dta gateway --output sessions.jsonl --load-hf MODEL --tokenizer-type HuggingFaceTokenizer \\
        --tokenizer-model MODEL --apply-chat-template --rollout-max-response-len 1024

The model answers from this process (--load, --load-hf), or from servers (--rollout-engine vllm --rollout-server-url).
A session is opened with the gateway's key, used with its own key, rewarded and closed:

    POST /v1/sessions {"group_id": "task 7"}      -> {"id": ..., "key": "sk-..."}      with the gateway's key
    ... calls with the session's key ...
    POST /v1/session/reward {"reward": 1.0}       or {"reward": 0.2, "call": "chatcmpl-..."} for one call
    POST /v1/session/close {}                     or {"failed": true}

The rollouts of a closed session with a reward are appended to --output as one write; train on them with --rollouts.
Failed sessions, and those that are open when the gateway ends, are counted and dropped. Started again with the same
--output, a gateway that was killed continues the file.
"""

from __future__ import annotations

import os
import secrets
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError, raise_all
from megatron_dta.training.config.checks.all import check_engine
from megatron_dta.training.config.checks.rollouts import SERVERS
from megatron_dta.training.megatron_args import ENGINE, MESH, ToolFlags, passed_over
from megatron_dta.training.monitor.stop_signals import kept_signals

if TYPE_CHECKING:
    from megatron_dta.extras.agents.gateway.session_log import SessionLog
    from megatron_dta.sampling.interface import RolloutEngine
    from megatron_dta.sampling.prompts.tokenizer import Tokenizer
    from megatron_dta.training.config import TrainConfig

FLAGS = ToolFlags(
    "megatron-dta gateway",
    ("model", "agent"),
    f"{MESH} {ENGINE} load load_hf hf_checkpoint skip_checkpoint_checks tokenizer_type tokenizer_model "
    "apply_chat_template apply_chat_template_kwargs eos_id rollout_engine rollout_server_url "
    "rollout_timeout rollout_attempts",
)
_KEY = "MEGATRON_DTA_GATEWAY_KEY"
# Kept open for their locks.
_KEY_FILES: list[IO[str]] = []


def main() -> None:
    """Read the flags, start the engine and the server, and serve until SIGINT or SIGTERM."""
    parser = CommandLineParser(__doc__)
    parser.add_argument("--output", required=True, metavar="FILE", help="file of rollouts to append to, .jsonl")
    parser.add_argument(
        "--key-file", metavar="FILE", help=f"file for the gateway's key (default: {_KEY}, or --output's with .key)"
    )
    parser.add_argument(
        "--max-sessions",
        type=int,
        default=1024,
        metavar="N",
        help="maximum number of open sessions (default: %(default)s)",
    )
    arguments, others = parser.parse_known_args()
    if Path(arguments.output).suffix != ".jsonl":
        raise InputError(f"--output {arguments.output}: must end in .jsonl")
    if arguments.max_sessions < 1:
        raise InputError(f"--max-sessions {arguments.max_sessions}: must be at least 1")
    config, left_out = FLAGS.parse(others)
    _check(config)
    if left_out:
        print(passed_over(left_out))
    _serve(config, arguments)


def _check(config: TrainConfig) -> None:
    check_engine(config)
    sampling, checkpoint, agent = config.sampling, config.checkpoint, config.agent
    lines = []
    if sampling.tokenizer_type is None:
        lines.append("--tokenizer-type is missing (and usually --tokenizer-model)")
    if sampling.rollout_engine in SERVERS and not sampling.rollout_server_url:
        lines.append(f"--rollout-engine {sampling.rollout_engine} needs --rollout-server-url http://HOST:PORT")
    if sampling.rollout_engine == "in-process" and checkpoint.load is None and checkpoint.load_hf is None:
        lines.append("--load or --load-hf is missing: the model that answers")
    if agent.is_used:
        lines.append("--agent-command and --agent-callable run inside training; leave them out and call the gateway")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        lines.append("the gateway is one process; for a model that needs several use --rollout-engine vllm or sglang")
    raise_all(lines)


def _serve(config: TrainConfig, arguments: object) -> None:
    from megatron_dta.extras.agents.gateway.engine_loop import EngineLoop
    from megatron_dta.extras.agents.gateway.gateway import Gateway
    from megatron_dta.extras.agents.gateway.http.server import check_packages
    from megatron_dta.extras.agents.gateway.session_log import SessionLog
    from megatron_dta.extras.agents.service import gateway_settings
    from megatron_dta.sampling.interface import phase
    from megatron_dta.sampling.prompts.tokenizer import build_tokenizer
    from megatron_dta.sampling.sources.independent import sampling_params
    from megatron_dta.sampling.task import chat_template
    from megatron_dta.training.monitor.run_description import tokenizer_lines

    check_packages("megatron-dta gateway")
    sampling = config.sampling
    checkpoint = config.checkpoint.hf_checkpoint or config.checkpoint.load
    kind, file = sampling.tokenizer_type or "", sampling.tokenizer_model
    tokenizer = build_tokenizer(kind, file, sampling.eos_id, config.model.vocab_size, checkpoint)
    template = chat_template(sampling)
    log = SessionLog(Path(arguments.output))
    key = _key(arguments)
    engine = _engine(config, tokenizer)
    params = sampling_params(tokenizer, sampling, config.optimization.seed)
    loop = EngineLoop(engine)
    gateway = Gateway(loop, tokenizer, template, params, gateway_settings(config, arguments.max_sessions))
    signals = kept_signals()
    server = _server(config, gateway, log, key)
    for name, text in tokenizer_lines(tokenizer, config.model.vocab_size):
        print(f"{name:10}{text}" if name else text)
    where = f"key in {_key_file(arguments)}" if _KEY not in os.environ else f"key from {_KEY}"
    if template is not None:
        date = f"; its template writes the date {template.date:%Y-%m-%d %H:%M:%S}" if template.writes_date else ""
        print(f"tool calls: {gateway.parser.tool_calls}, reasoning: {gateway.parser.reasoning}{date}")
    print(f"gateway: {server.url} ({where}), sessions to {arguments.output}", flush=True)
    try:
        with phase(engine, params, 0):
            loop.run(lambda: bool(signals))
    finally:
        server.close()
        log.close()
        engine.close()
    dropped = log.failed + len(gateway.sessions)
    print(f"{log.finished} sessions recorded, {dropped} failed or unfinished ones dropped")


def _server(config: TrainConfig, gateway: object, log: SessionLog, key: str) -> object:
    from megatron_dta.extras.agents.gateway.http.application import Administration, Application
    from megatron_dta.extras.agents.gateway.http.server import GatewayServer

    def opened(group_id: str) -> tuple[str, str]:
        session, session_key = gateway.sessions.open(secrets.randbits(62), group_id)
        return session.session_id, session_key

    def closed(session: object, failed: bool) -> None:
        gateway.close(session)
        log.close_session(session, failed)

    application = Application(gateway, Administration(key, opened, closed)).asgi()
    return GatewayServer(application, *config.agent.gateway_address)


def _key_file(arguments: object) -> Path:
    return Path(arguments.key_file) if arguments.key_file else Path(arguments.output).with_suffix(".key")


def _key(arguments: object) -> str:
    """The gateway's key: from the environment, or a new one in a file that only its owner may read."""
    key = os.environ.get(_KEY)
    if key is not None:
        if len(key) < 16:
            raise InputError(f"{_KEY}: must have at least 16 characters")
        return key
    path = _key_file(arguments)
    if path.exists() and path.samefile(arguments.output):
        raise InputError(f"--key-file {path}: is --output; give another file")
    try:
        return _new_key(path)
    except OSError as error:
        raise InputError(f"--key-file {path}: cannot be written ({error.strerror})") from error


def _new_key(path: Path) -> str:
    """A new key in ``path``, which stays locked until the process ends."""
    from megatron_dta.extras.agents.gateway.session_log import lock

    if path.exists():
        # A pipe would not open otherwise.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as old:
            lock(old, f"--key-file {path}")
            path.unlink()
    key = secrets.token_urlsafe(32)
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")
    lock(file, f"--key-file {path}")
    _KEY_FILES.append(file)
    file.write(key + "\n")
    file.flush()
    return key


def _engine(config: TrainConfig, tokenizer: Tokenizer) -> RolloutEngine:
    """The engine of the flags, with its model's weights."""
    from megatron_dta.wiring.engines import build_engine, server_engine

    report = partial(Console(stderr=True).print, soft_wrap=True)
    if config.sampling.rollout_engine in SERVERS:
        return server_engine(config, report)
    from megatron_dta.training.checkpoint.files import required_checkpoint
    from megatron_dta.wiring.setup import build_loaded_model

    load = config.checkpoint.load
    model = build_loaded_model(config, tokenizer, None if load is None else required_checkpoint("--load", load))
    return build_engine(config.sampling, model, attention_impl=config.tree.tree_attention_impl, report=report)
