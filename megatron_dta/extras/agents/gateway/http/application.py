"""The ASGI application: routes, keys, limits on bodies and time, and errors as one line each.

    POST /v1/chat/completions, /v1/completions, /v1/responses          OpenAI's, with a session's key
    GET  /v1/models                                                    of both, with a session's key
    POST /v1/messages, /v1/messages/count_tokens                       Anthropic's, with a session's key
    POST /v1/session/reward, /v1/session/close                         with a session's key
    POST /v1/sessions                                                  with the gateway's key; opens a session
    GET  /health

The key is a bearer token or, as Anthropic's clients send it, ``x-api-key``.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_dta.extras.agents.gateway.errors import RequestError, refuse
from megatron_dta.extras.agents.gateway.gateway import CallSettings, Choice, Gateway, new_call_id
from megatron_dta.extras.agents.gateway.http import anthropic, responses
from megatron_dta.extras.agents.gateway.http.bodies import BodyBudget, limited_body
from megatron_dta.extras.agents.gateway.http.openai_replies import OpenAIReplies
from megatron_dta.extras.agents.gateway.http.schemas import (
    AnthropicRequest,
    ChatRequest,
    CloseRequest,
    CompletionRequest,
    CountRequest,
    OpenRequest,
    ResponsesRequest,
    RewardRequest,
    parsed,
)
from megatron_dta.extras.agents.gateway.prompts import GatewayPrompt
from megatron_dta.extras.agents.gateway.session import Session

_LOG = logging.getLogger(__name__)
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip
# Bodies of the largest size that may be in memory at once while they are read, each of another session.
_BODIES_AT_ONCE = 8


@dataclass(frozen=True)
class Administration:
    """What the owner of the gateway may do over HTTP.

    Attributes:
        key: the gateway's key.
        open: opens a session for a group and returns its id and key.
        closed: called with a session that its client closes, and whether it failed.
    """

    key: str
    open: Callable[[str], tuple[str, str]]
    closed: Callable[[Session, bool], None]


class Application:
    """The routes on a gateway.

    Args:
        administration: None where sessions are opened and closed from inside (training).
    """

    def __init__(self, gateway: Gateway, administration: Administration | None = None) -> None:
        self._gateway, self._administration = gateway, administration
        # Tokenization of a body takes time on the event loop, and memory; one at a time.
        self._prompts = asyncio.Lock()
        flags = gateway.settings.flags
        self._most_bytes, self._call_seconds = int(flags.gateway_max_body_mib * 2**20), flags.agent_timeout
        self._bodies = BodyBudget(_BODIES_AT_ONCE * self._most_bytes, self._most_bytes)

    def asgi(self) -> Starlette:
        """The application for a server."""
        routes = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._complete,
            "/v1/responses": self._respond,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._count,
            "/v1/session/reward": self._reward,
        }
        if self._administration is not None:
            routes |= {"/v1/sessions": self._open, "/v1/session/close": self._close}
        return Starlette(
            routes=[
                *(Route(path, self._guarded(call), methods=["POST"]) for path, call in routes.items()),
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                *(Route(path, lambda request: Response(), methods=["GET"]) for path in ("/", "/health")),
            ],
            exception_handlers={HTTPException: _no_route},
        )

    def _guarded(self, call: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """``call`` within the time limit; its errors become replies."""

        async def guarded(request: Request) -> Response:
            try:
                async with asyncio.timeout(self._call_seconds):
                    return await call(request)
            except RequestError as error:
                return _error(error, request.url.path)
            except TimeoutError:
                return _error(RequestError(504, "the call took longer than --agent-timeout"), request.url.path)
            except ClientDisconnect:
                return Response(status_code=499)
            except RecursionError:
                return _error(refuse("body: is nested too deeply"), request.url.path)
            except Exception:
                _LOG.exception("a call failed")
                return _error(RequestError(500, "the gateway failed; its log says why"), request.url.path)

        return guarded

    async def _body(self, request: Request, session: Session | None) -> bytes:
        body = await limited_body(request, self._most_bytes, self._bodies, session)
        if session is not None:
            self._session(request)  # it may have been closed while the body came
        return body

    def _session(self, request: Request) -> Session:
        return self._gateway.sessions.find(_key(request))

    async def _models(self, request: Request) -> Response:
        self._session(request)
        name = self._gateway.settings.model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "megatron_dta"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        body = parsed(ChatRequest, await self._body(request, session))
        settings = body.settings(body.max_completion_tokens or body.max_tokens)
        tools = body.offered_tools
        async with self._prompts:
            prompt = self._gateway.prompts.chat(session, [m.model_dump() for m in body.messages], tools)
        replies = self._replies(body.model, True, bool(body.logprobs), bool(tools))
        return await self._reply(request, body, session, prompt, settings, replies)

    async def _complete(self, request: Request) -> Response:
        session = self._session(request)
        body = parsed(CompletionRequest, await self._body(request, session))
        settings = body.settings(body.max_tokens)
        async with self._prompts:
            build = self._gateway.prompts.text if isinstance(body.prompt, str) else self._gateway.prompts.ids
            prompt = build(session, body.prompt)
        replies = self._replies(body.model, False, body.logprobs is not None, False)
        return await self._reply(request, body, session, prompt, settings, replies)

    def _replies(self, model: str, is_chat: bool, wants_logprobs: bool, has_tools: bool) -> OpenAIReplies:
        name = model or self._gateway.settings.model_name
        return OpenAIReplies(self._gateway.tokenizer, name, is_chat, wants_logprobs, has_tools)

    async def _reply(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        session: Session,
        prompt: GatewayPrompt,
        settings: CallSettings,
        replies: OpenAIReplies,
    ) -> Response:
        if not body.stream:
            answer = self._gateway.answer(session, prompt, settings)
            return JSONResponse(replies.whole(prompt, await _unless_gone(request, answer)))
        call_id, parser = new_call_id(), self._gateway.parser
        items = self._gateway.stream(session, prompt, settings, call_id)
        usage = bool((body.stream_options or {}).get("include_usage"))
        return await self._stream(items, lambda checked: replies.stream(prompt, checked, parser, call_id, usage))

    async def _respond(self, request: Request) -> Response:
        session = self._session(request)
        body = parsed(ResponsesRequest, await self._body(request, session))
        tools, settings, call_id = responses.tools_of(body), body.settings(), new_call_id()
        async with self._prompts:
            prompt = self._gateway.prompts.chat(session, responses.messages_of(body), tools)
        model = body.model or self._gateway.settings.model_name
        writer = responses.ResponseWriter(body, model, prompt, call_id, self._gateway.tokenizer)
        if body.stream:
            items, parser = self._gateway.stream(session, prompt, settings, call_id), self._gateway.parser
            return await self._stream(items, lambda checked: writer.stream(checked, parser, bool(tools)))
        choices = await _unless_gone(request, self._gateway.answer(session, prompt, settings, call_id))
        return JSONResponse(writer.whole(choices[0]))

    async def _message(self, request: Request) -> Response:
        session = self._session(request)
        body = parsed(AnthropicRequest, await self._body(request, session))
        settings, call_id = body.settings(), new_call_id()
        prompt, has_tools = await self._anthropic_prompt(session, body)
        model = body.model or self._gateway.settings.model_name
        if body.stream:
            items, parser = self._gateway.stream(session, prompt, settings, call_id), self._gateway.parser
            return await self._stream(
                items, lambda checked: anthropic.stream(model, prompt, checked, parser, call_id, has_tools)
            )
        choices = await _unless_gone(request, self._gateway.answer(session, prompt, settings, call_id))
        return JSONResponse(anthropic.whole(model, prompt, choices[0]))

    async def _count(self, request: Request) -> Response:
        """The prompt is then known to the session, so that it is tokenized once."""
        session = self._session(request)
        body = parsed(CountRequest, await self._body(request, session))
        prompt, _ = await self._anthropic_prompt(session, body)
        return JSONResponse({"input_tokens": len(prompt.token_ids)})

    async def _anthropic_prompt(self, session: Session, body: CountRequest) -> tuple[GatewayPrompt, bool]:
        """The prompt, and whether it offers tools."""
        tools = anthropic.tools_of(body)
        async with self._prompts:
            return self._gateway.prompts.chat(session, anthropic.messages_of(body), tools), bool(tools)

    async def _stream(
        self, items: AsyncIterator[Any], write: Callable[[AsyncIterator[Any]], AsyncIterator[bytes]]
    ) -> Response:
        """A streamed reply. The first piece is awaited here, so that its errors still become a status."""
        first = await anext(items)

        async def checked() -> AsyncIterator[Any]:
            yield first
            if not isinstance(first, Choice):
                async for item in items:
                    yield item

        async def limited() -> AsyncIterator[bytes]:
            try:
                async with asyncio.timeout(self._call_seconds):
                    async for piece in write(checked()):
                        yield piece
            except (RequestError, TimeoutError) as error:
                message = getattr(error, "message", "the call took longer than --agent-timeout")
                yield b"data: " + json.dumps({"error": {"message": message}}).encode() + b"\n\n"
            finally:
                await items.aclose()

        return ClosingResponse(limited(), media_type="text/event-stream")

    async def _reward(self, request: Request) -> Response:
        session = self._session(request)
        body = parsed(RewardRequest, await self._body(request, session))
        # chatcmpl-ID, cmpl-ID, msg_ID, resp_ID
        call = None if body.call is None else body.call.replace("_", "-").rpartition("-")[2]
        self._gateway.sessions.set_reward(session, body.reward, call)
        return JSONResponse({"calls": len(session.calls)})

    async def _open(self, request: Request) -> Response:
        assert self._administration is not None
        if not hmac.compare_digest((_key(request) or "").encode("utf-8", "replace"), self._administration.key.encode()):
            raise RequestError(401, "opening a session needs the gateway's key")
        body = parsed(OpenRequest, await self._body(request, None))
        session_id, key = self._administration.open(body.group_id)
        return JSONResponse({"id": session_id, "key": key})

    async def _close(self, request: Request) -> Response:
        assert self._administration is not None
        session = self._session(request)
        body = parsed(CloseRequest, await self._body(request, session))
        if session.running:
            raise refuse(f"{session.running} calls are running; wait for them and close the session then")
        self._administration.closed(session, body.failed)
        return JSONResponse({"calls": len(session.calls), "branches": Counter(session.branches.values())})


class ClosingResponse(StreamingResponse):
    """A stream that is closed when its client has gone."""

    async def stream_response(self, send: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self.body_iterator.aclose()


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _error(RequestError(status, f"{request.method} {request.url.path[:100]}: no such route"), request.url.path)


async def _unless_gone(request: Request, answer: Awaitable[Any]) -> Any:
    """The answer, or ``ClientDisconnect`` as soon as the client has closed its connection."""
    work = asyncio.ensure_future(answer)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        watch.cancel()
        if not work.done():
            work.cancel()


async def _gone(request: Request) -> None:
    """Returns when the client has closed its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _key(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")


def _error(error: RequestError, path: str) -> Response:
    kind = _KINDS.get(error.status, "api_error")
    if path.startswith("/v1/messages"):
        content: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    else:
        content = {"error": {"message": error.message, "type": kind, "code": error.status, "param": None}}
    # Of a body that is refused the rest is not read.
    headers = {"connection": "close"} if error.status in (408, 413, 429, 503) else None
    return JSONResponse(content, error.status, headers)
