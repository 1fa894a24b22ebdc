"""Settings of agents as a source of rollouts, and of the gateway that answers their calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.options import NO_FLAG, option
from megatron_dta.sampling.prompts.tool_calls import FORMS

agent_option = partial(option, needs="agent_command or agent_callable")


@dataclass
class AgentConfig:
    """Settings of ``megatron_dta.extras.agents`` and ``megatron_dta.extras.agents.gateway``."""

    agent_command: str | None = option(
        None,
        "Program that is an agent: it is run once for each rollout, gets the prompt's record as JSON on standard "
        "input, and calls the gateway through OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and "
        "ANTHROPIC_API_KEY.",
        needs="prompt_data or task",
    )
    agent_callable: str | None = option(
        None,
        "Python function that is an agent, FILE.py:NAME; called in a thread as NAME(record, access) with base_url, "
        "api_key, anthropic_base_url and session_url in access. It may return its reward.",
        needs="prompt_data or task",
    )
    agent_concurrency: int = agent_option(32, "Agents that run at once, for each data-parallel replica.", minimum=1)
    agent_timeout: float = agent_option(
        600.0,
        "Timeout in seconds for one run of an agent, which is then stopped and has failed, and for one call of the "
        "gateway.",
        above=0,
    )
    gateway_host: str = agent_option(
        "127.0.0.1",
        "Address that the gateway listens on, HOST or HOST:PORT (default port: any free one); the data-parallel rank "
        "is added to the port. Other machines reach it if this is not a loopback address.",
    )
    gateway_max_body_mib: float = agent_option(16.0, "Longest request to the gateway in MiB.", above=0, flag=NO_FLAG)
    gateway_max_calls: int = agent_option(512, "Most calls of a session.", minimum=1)
    gateway_max_session_tokens: int = agent_option(
        4_000_000, "Most tokens of a session's tree, shared ones counted once.", minimum=1, flag=NO_FLAG
    )
    gateway_piece_tokens: int = agent_option(
        32,
        "Tokens of an answer that are sampled at once: the latency of streams, and of calls that come meanwhile. It "
        "does not change the samples.",
        minimum=1,
        flag=NO_FLAG,
    )
    gateway_override_sampling: bool = agent_option(
        False,
        "Sample with the run's temperature, nucleus, seed and thinking if a call asks for others, instead of refusing "
        "the call.",
    )
    tool_call_parser: str = agent_option(
        "auto",
        "How the model writes tool calls: as the tokenizer's response_template says or the chat template does (auto; "
        "if its form is none of these, calls stay text), or in one of these forms.",
        choices=("auto", *FORMS, "none"),
    )
    reasoning_parser: str = agent_option(
        "none",
        "Where clients find the model's reasoning: in the content, or separate from it (think: up to </think>).",
        choices=("none", "think"),
    )

    @property
    def gateway_address(self) -> tuple[str, int]:
        """Host and port of ``gateway_host``; port 0 is any free one."""
        host, _, port = self.gateway_host.rpartition(":")
        if not host or (":" in host and not host.startswith("[")):
            return self.gateway_host, 0
        if not port.isdecimal() or int(port) > 65535:
            raise InputError(f"--gateway-host {self.gateway_host}: the port must be a number up to 65535")
        return host.strip("[]"), int(port)

    @property
    def is_used(self) -> bool:
        """Whether agents are the source of rollouts."""
        return self.agent_command is not None or self.agent_callable is not None
