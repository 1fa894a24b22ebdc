"""The requests that the gateway takes. Fields that would change the answer but cannot are refused, never ignored.

Fields without influence on the answer (``user``, ``metadata``, ``store``, ...) are taken as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron_dta.extras.agents.gateway.errors import refuse
from megatron_dta.extras.agents.gateway.gateway import CallSettings

Model = TypeVar("Model", bound=BaseModel)
# Lists and texts are bounded by the size of the body.
StopStrings = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]


def _not_forced(choice: Any) -> Any:
    if choice not in (None, "auto", "none"):
        raise ValueError("the model decides; give auto or none")
    return choice


ToolChoice = Annotated[Any, BeforeValidator(_not_forced)]


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


class _Sampled(_Request):
    """What requests of all interfaces have."""

    model: str = ""
    stream: bool = False
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class _OpenAIRequest(_Sampled):
    n: int = Field(1, ge=1)
    stop: str | StopStrings | None = None
    stream_options: dict[str, Any] | None = None
    seed: int | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    user: str | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    reasoning_effort: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())

    def settings(self, max_tokens: int | None) -> CallSettings:
        """What is asked for besides the prompt."""
        if self.stream and self.n > 1:
            raise refuse("n: streams have one choice; leave out stream or n")
        hints = _hints({"reasoning_effort": self.reasoning_effort})
        return CallSettings(max_tokens, self.n, self.stops, self.temperature, self.top_p, self.seed, hints)


def _hints(fields: dict[str, Any]) -> tuple[str, ...]:
    """The names of the fields that have a value."""
    return tuple(name for name, value in fields.items() if value is not None)


def _check_format(name: str, answer_format: dict[str, Any] | None) -> None:
    if answer_format is not None and answer_format.get("type") != "text":
        raise refuse(
            f"{name}: {str(answer_format.get('type'))[:40]!r} would change what the model samples, and answers are "
            "trained as sampled; ask for JSON in the prompt, or offer a tool with the schema"
        )


class ChatRequest(_OpenAIRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools, as templates take them; ``RequestError`` if the answer must have another format than text."""
        _check_format("response_format", self.response_format)
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
    """A message of Anthropic's interface; those of the system may come later, too."""

    role: Literal["system", "user", "assistant"]
    content: str | list[Block]


class AnthropicTool(BaseModel):
    """A tool of Anthropic's interface; those that Anthropic's servers run are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)


class CountRequest(_Request):
    """The body of /v1/messages/count_tokens. Where the cache ends (``cache_control``) is the gateway's own affair."""

    model: str = ""
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class AnthropicRequest(CountRequest, _Sampled):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopStrings | None = None
    top_k: int | None = None

    def settings(self) -> CallSettings:
        """What is asked for besides the prompt."""
        if any(edit.get("keep") != "all" for edit in (self.context_management or {}).get("edits") or ()):
            raise refuse("context_management: the gateway takes a history as it is; leave it out, or keep all")
        output = self.output_config or {}
        _check_format("output_config.format", output.get("format"))
        thinking = None if (self.thinking or {}).get("type", "adaptive") == "adaptive" else self.thinking
        hints = _hints({"top_k": self.top_k, "thinking": thinking, "output_config.effort": output.get("effort")})
        stops = tuple(self.stop_sequences or ())
        return CallSettings(self.max_tokens, 1, stops, self.temperature, self.top_p, None, hints)


class Item(BaseModel):
    """An item of the input of /v1/responses; types without these fields are refused later."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str = "{}"
    output: str | list[Part] | None = None


class ResponseTool(BaseModel):
    """A tool of /v1/responses; other types than functions are refused later."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(_Sampled):
    """The body of /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    previous_response_id: None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    background: Literal[False] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    client_metadata: dict[str, Any] | None = None

    def settings(self) -> CallSettings:
        """What is asked for besides the prompt."""
        text, effort = self.text or {}, (self.reasoning or {}).get("effort")
        _check_format("text.format", text.get("format"))
        hints = _hints({"reasoning.effort": effort, "text.verbosity": text.get("verbosity")})
        return CallSettings(self.max_output_tokens, 1, (), self.temperature, self.top_p, None, hints)


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
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "the gateway does not know this field; leave it out"
        raise refuse(f"{field or 'body'}: {message}") from None
