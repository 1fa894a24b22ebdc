"""The gateway without its HTTP side: builds prompts, samples answers and adds them to their sessions' trees."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from megatron_dta.extras.agents.gateway.answers import Sampled, sample_answer
from megatron_dta.extras.agents.gateway.branches import note_call
from megatron_dta.extras.agents.gateway.engine_loop import EngineLoop
from megatron_dta.extras.agents.gateway.errors import refuse
from megatron_dta.extras.agents.gateway.messages import Answer, AnswerParser
from megatron_dta.extras.agents.gateway.prompts import GatewayPrompt, PromptBuilder
from megatron_dta.extras.agents.gateway.session import Call, Session
from megatron_dta.extras.agents.gateway.sessions import GatewaySettings, Sessions
from megatron_dta.sampling.interface import GenerationRequest
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallSettings:
    """What a request asks for besides its prompt; None: the run's value.

    Attributes:
        hints: names of fields that ask for what the run decides (top_k, how much the model thinks).
    """

    max_tokens: int | None = None
    choices: int = 1
    stops: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    hints: tuple[str, ...] = ()


def new_call_id() -> str:
    return secrets.token_hex(12)


@dataclass(frozen=True)
class Choice:
    """One finished answer of a call."""

    call: Call
    sampled: Sampled
    answer: Answer


class Gateway:
    """Answers calls.

    Attributes:
        params: sampling parameters of the run; set before each phase.
    """

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        params: SamplingParams,
        settings: GatewaySettings,
    ) -> None:
        self.loop, self.tokenizer, self.params, self.settings = loop, tokenizer, params, settings
        self.sessions = Sessions(settings)
        flags = settings.flags
        self.prompts = PromptBuilder(tokenizer, template, settings.max_positions - 1, flags.gateway_max_session_tokens)
        self.parser = AnswerParser.of(flags.tool_call_parser, flags.reasoning_parser, template)
        self._decode = tokenizer.decode if self.parser.form is None else self.parser.form.decoder(tokenizer)

    def _room(self, prompt: GatewayPrompt, wanted: CallSettings) -> int:
        """The most tokens that an answer may have; ``RequestError`` if a sampling setting differs from the run's."""
        self._check_sampling(wanted)
        most = min(self.params.max_response_tokens, self.settings.max_positions - len(prompt.token_ids))
        return most if wanted.max_tokens is None else min(most, wanted.max_tokens)

    def _check_sampling(self, wanted: CallSettings) -> None:
        if self.settings.flags.gateway_override_sampling:
            return
        for name, value, of_run in (
            ("temperature", wanted.temperature, self.params.temperature),
            ("top_p", wanted.top_p, self.params.top_p),
        ):
            if value is not None and value != of_run:
                raise refuse(
                    f"{name}: {value} is not the run's {of_run:g}, with which the tokens are trained; leave it out, or "
                    "start the gateway with --gateway-override-sampling"
                )
        for name in ("seed",) * (wanted.seed is not None) + wanted.hints:
            raise refuse(f"{name}: the run decides; leave it out, or start with --gateway-override-sampling")

    async def answer(
        self, session: Session, prompt: GatewayPrompt, wanted: CallSettings, call_id: str | None = None
    ) -> list[Choice]:
        """All choices of a call, added to the session's tree. If the caller is cancelled none of them is.

        Args:
            call_id: of a call with one choice (default: a new one).
        """
        end = self.sessions.reserve(session, wanted.choices)
        try:
            pieces = [self._sampled(session, prompt, wanted) for _ in range(wanted.choices)]
            tasks = [asyncio.ensure_future(self._last(choice)) for choice in pieces]
            began = time.monotonic()
            try:
                answers = await asyncio.gather(*tasks)
            except BaseException:
                session.counts.abandoned_calls += wanted.choices
                for task in tasks:
                    task.cancel()
                    task.add_done_callback(self._release_result)
                raise
            return [self._finish(session, prompt, sampled, began, call_id or new_call_id()) for sampled in answers]
        finally:
            end()

    async def stream(
        self, session: Session, prompt: GatewayPrompt, wanted: CallSettings, call_id: str
    ) -> AsyncIterator[Sampled | Choice]:
        """One answer, piece by piece; the last item is the choice, which is in the session's tree by then."""
        end = self.sessions.reserve(session, 1)
        is_done, began, pieces = False, time.monotonic(), None
        try:
            pieces = self._sampled(session, prompt, wanted)
            async for sampled in pieces:
                if not sampled.finish:
                    yield sampled
                    continue
                is_done = True
                choice = self._finish(session, prompt, sampled, began, call_id)
                end()
                yield choice
        finally:
            if pieces is not None:
                await pieces.aclose()
            if not is_done:
                session.counts.abandoned_calls += pieces is not None
                end()

    def _sampled(self, session: Session, prompt: GatewayPrompt, wanted: CallSettings) -> AsyncIterator[Sampled]:
        max_tokens = self._room(prompt, wanted)
        parent = session.held_before(prompt.node)
        key = session.random_key(prompt.token_ids)
        request = GenerationRequest(0, prompt.token_ids, max_tokens, key, parent)
        return sample_answer(self.loop, self._decode, request, wanted.stops, self.settings.flags.gateway_piece_tokens)

    @staticmethod
    async def _last(pieces: AsyncIterator[Sampled]) -> Sampled:
        last = None
        async for sampled in pieces:
            last = sampled
        return last

    def _release_result(self, task: asyncio.Task[Sampled]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.loop.release(task.result().request_id)

    def _finish(self, session: Session, prompt: GatewayPrompt, sampled: Sampled, began: float, call_id: str) -> Choice:
        """Add a finished answer to the tree. The session may be closed by now: then the answer is of no use."""
        answer = self.parser.parse(sampled.text, call_id, prompt.tools)
        call = Call(
            base=prompt.node,
            base_length=len(prompt.token_ids),
            new_ids=sampled.output,
            number=len(session.calls),
            call_id=call_id,
            logprobs=sampled.logprobs,
            policy_version=sampled.policy_version,
            finish="tool_calls" if answer.tool_calls else sampled.finish,
            seconds=time.monotonic() - began,
            tools=tuple(tool.name for tool in answer.tool_calls),
        )
        if not session.is_open:
            session.counts.abandoned_calls += 1
            self.loop.release(sampled.request_id)
            return Choice(call, sampled, answer)
        session.add(call)
        session.last_text = sampled.text
        text = sampled.text + (sampled.stop or "")
        repeated = self.parser.parse(text, call_id, prompt.tools) if sampled.stop else answer
        note_call(session, prompt, call, [answer.message(), repeated.message()])
        # A token may go on after the stop string; then no history has the sampled ids.
        if not sampled.stop or self._decode(sampled.output) == text:
            self.prompts.remember(session, prompt, call, text, repeated if prompt.messages is not None else None)
        self._hold(session, call, sampled.request_id)
        return Choice(call, sampled, answer)

    def _hold(self, session: Session, call: Call, request_id: int) -> None:
        """Keep the K/V of the new call and no longer that of the call that it continues."""
        if call.parent is not None:
            old = session.held.pop(call.parent.number, None)
            if old is not None:
                self.loop.release(old)
        session.held[call.number] = request_id

    def close(self, session: Session) -> None:
        """Close a session and let go of its K/V."""
        self.sessions.close(session)
        for request_id in session.held.values():
            self.loop.release(request_id)
        session.held.clear()
