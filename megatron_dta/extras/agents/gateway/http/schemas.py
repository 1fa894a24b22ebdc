"""The requests that the gateway takes. Fields that would change the answer but cannot are refused, never ignored.

Fields without influence on the answer (``user``, ``metadata``, ``store``, ...) are taken as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_dta.extras.agents.gateway.errors import refuse
from megatron_dta.extras.agents.gateway.gateway import CallSettings

Model = TypeVar("Model", bound=BaseModel)
# Lists and texts are bounded by the size of the body.
StopStrings = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Function(BaseModel):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCallMessage(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Part(BaseModel):
    """A part of a content; other types than text are refused later, by their names."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(BaseModel):
    """A message of a conversation. Fields that templates do not know are dropped (``refusal``, ``audio``: null)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    reasoning_content: str | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]


class _OpenAIRequest(_Request):
    model: str = ""
    n: int = Field(1, ge=1)
    stop: str | StopStrings | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())

    def settings(self, max_tokens: int | None) -> CallSettings:
        """What is asked for besides the prompt."""
        if self.stream and self.n > 1:
            raise refuse("n: streams have one choice; leave out stream or n")
        return CallSettings(max_tokens, self.n, self.stops, self.temperature, self.top_p, self.seed)


class ChatRequest(_OpenAIRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    reasoning_effort: None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools, as templates take them."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump() for tool in self.tools]


class CompletionRequest(_OpenAIRequest):
    """The body of /v1/completions; several prompts in one request are refused."""

    prompt: str | list[int]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: Literal[0, 1] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class Block(BaseModel):
    """A block of a content of Anthropic's interface; other types than those of these fields are refused later."""

    type: str
    text: str | None = None
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class AnthropicMessage(_Request):
    """A message of Anthropic's interface."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(BaseModel):
    """A tool of Anthropic's interface."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)


class AnthropicRequest(_Request):
    """The body of /v1/messages."""

    model: str = ""
    messages: list[AnthropicMessage] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: StopStrings | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def settings(self) -> CallSettings:
        """What is asked for besides the prompt."""
        stops = tuple(self.stop_sequences or ())
        return CallSettings(self.max_tokens, 1, stops, self.temperature, self.top_p)


class RewardRequest(_Request):
    """The body of /v1/session/reward."""

    reward: float
    call: str | None = None


class OpenRequest(_Request):
    """The body of /v1/sessions."""

    group_id: str = Field("0", max_length=256)


class CloseRequest(_Request):
    """The body of /v1/session/close."""

    failed: bool = False


def parsed(model: type[Model], body: bytes) -> Model:
    """The request in ``body``; ``RequestError`` names a wrong field and never repeats the body."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # The deepest one belongs to the form that was meant, where a field may have several.
        first = max(errors, key=lambda error: len(error["loc"]))
        field = ".".join(str(part) for part in first["loc"][:6])
        message = first["msg"]
        if first["type"] == "extra_forbidden":
            message = "the gateway does not know this field; leave it out"
        raise refuse(f"{field or 'body'}: {message}") from None
