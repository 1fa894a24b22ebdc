"""A running gateway on a scripted engine, with a chat template like Qwen3's: tools, and reasoning that is left out of
earlier turns.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chat_folder import make_chat_folder
from megatron_dta.core.model.parallel.mesh import alone, current_mesh
from megatron_dta.extras.agents.gateway.engine_loop import EngineLoop
from megatron_dta.extras.agents.gateway.gateway import Gateway
from megatron_dta.extras.agents.gateway.http.application import Administration, Application
from megatron_dta.extras.agents.gateway.http.server import GatewayServer
from megatron_dta.extras.agents.gateway.sessions import GatewaySettings
from megatron_dta.sampling.interface import RolloutEngine, phase
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.training.config import AgentConfig

AGENT_TEMPLATE = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set text = m.content %}{% set thought = m.reasoning_content %}"
    "{% if not thought and '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1] %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if thought and loop.index0 > ns.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ text }}"
    "{% for c in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class OpenGateway:
    """A gateway that serves; ``url`` is without a path."""

    gateway: Gateway
    url: str
    admin_key: str
    closed: list[tuple[object, bool]]

    def open(self, group_id: str = "0", number: int | None = None) -> tuple[object, str]:
        """A session and its key."""
        return self.gateway.sessions.open(len(self.gateway.sessions) if number is None else number, group_id)


def chat_tokenizer(folder: Path, template: str = AGENT_TEMPLATE, *ends: str) -> HuggingFaceTokenizer:
    """A byte tokenizer with merges and the template, in ``folder``; special tokens ``ends`` end answers, too."""
    texts = ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1, "b": 2}}', "assistant user system"]
    tokenizer = HuggingFaceTokenizer(make_chat_folder(folder, template, texts=texts * 3))
    if not ends:
        return tokenizer
    return HuggingFaceTokenizer(folder, [tokenizer.eos_id, *(int(tokenizer.encode(end)[0]) for end in ends)])


@contextmanager
def open_gateway(
    engine: RolloutEngine,
    tokenizer: HuggingFaceTokenizer,
    folder: Path,
    max_concurrent: int = 32,
    max_tokens: tuple[int, int] = (64, 4096),
    **flags: object,
) -> Iterator[OpenGateway]:
    """Serve with these flags until the block ends; ``max_tokens`` of an answer, and of a whole sequence."""
    params = SamplingParams(max_tokens[0], tokenizer.eos_id, other_eos_ids=tuple(tokenizer.ends)[1:])
    agent = AgentConfig(**{"gateway_piece_tokens": 8, **flags})
    loop = EngineLoop(engine, current_mesh)
    settings = GatewaySettings(agent, "tiny", max_tokens[1], max_concurrent=max_concurrent)
    gateway = Gateway(loop, tokenizer, ChatTemplate(folder), params, settings)
    over = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with alone(), phase(engine, params, 0):
                loop.run(over.is_set)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    closed: list[tuple[object, bool]] = []

    def opened(group_id: str) -> tuple[str, str]:
        session, key = gateway.sessions.open(len(closed), group_id)
        return session.session_id, key

    def end(session: object, failed: bool) -> None:
        closed.append((session, failed))
        gateway.close(session)

    application = Application(gateway, Administration("admin", opened, end)).asgi()
    server = GatewayServer(application, "127.0.0.1", 0)
    try:
        yield OpenGateway(gateway, server.url, "admin", closed)
    finally:
        server.close()
        over.set()
        thread.join(30)
        assert not errors, errors
