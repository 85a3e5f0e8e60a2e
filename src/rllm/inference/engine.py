"""Inference engines: chat messages in, one sampled answer with its exact tokens out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol, TypeGuard

from rllm.capture.tokens import tokens_of_choice
from rllm.errors import ConfigError
from rllm.parser.decoding import join_reasoning
from rllm.types import JSONMapping, JSONObject, LogprobsKind, Message, text_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one answer. All are sent explicitly, so no server-side default changes the policy."""

    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    max_tokens: int | None = None
    """`None`: as many as fit into the context."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings; their sampled ids stay in the answer's ids."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature <= 10.0, "temperature", self.temperature, "use a number from 0 to 10")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "use a number above 0, up to 1")
        _require(self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "use -1 (all tokens) or at least 1")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "use at least 1")

    @classmethod
    def from_request(cls, request: JSONMapping) -> SamplingParams:
        """Read the sampling fields of an OpenAI chat request; absent and null fields take defaults, others are ignored.

        Raises:
            ConfigError: if a value has the wrong type or is out of range.
        """
        values: JSONObject = {}
        for name, convert in _REQUEST_FIELDS.items():
            if request.get(name) is not None:
                try:
                    values[name] = convert(request[name])
                except (TypeError, ValueError) as error:
                    raise ParameterError(f"{name}={request[name]!r}: {error}", name) from error
        if (limit := values.pop("max_completion_tokens", None)) is not None:
            values["max_tokens"] = limit
        return cls(**values)

    def to_dict(self) -> JSONObject:
        return {item.name: getattr(self, item.name) for item in fields(self)}


class ParameterError(ConfigError):
    """Invalid field of a request; `param` is its key, see `rllm.inference.parameters`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise ParameterError(f"{name}={value!r}: {remedy}", name)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("use a number")
    return float(value)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("use an integer")
    return value


def _strings(value: str | Sequence[str]) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(item, str) and item for item in strings):
        raise TypeError("use a non-empty string or a list of them")
    return strings


_REQUEST_FIELDS: dict[str, Callable[[Any], object]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "max_tokens": _integer,
    "max_completion_tokens": _integer,
    "stop": _strings,
    "stop_token_ids": lambda value: tuple(_integer(item) for item in value),
    "seed": _integer,
}


@dataclass(kw_only=True)
class ModelOutput:
    """One sampled answer: text for the agent, tokens for the trainer."""

    id: str = ""
    """Key of the call's trace and step (`Trace.id`, `Step.id`): the id of a server's answer, else empty."""
    text: str = ""
    """The decoded answer without special tokens. A server that separates reasoning has it put back in its tags;
    tool calls that a server has parsed are not included."""
    content: str = ""
    reasoning: str = ""
    tool_calls: list[JSONObject] = field(default_factory=list)
    """In the OpenAI format: `{"id", "type": "function", "function": {"name", "arguments"}}`."""
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One per completion id."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each completion id, the likeliest ids in its place with their log-probabilities, if requested."""
    logprobs_kind: LogprobsKind = "unknown"
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls` or `abort`."""
    stop_string: str | None = None
    weight_version: int | None = None
    weight_updates: list[list[int]] = field(default_factory=list)
    """Positions of weight updates within the answer; see `rllm.types.Trace`."""
    template_hash: str | None = None
    sampling: JSONObject = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Replace `None`, which users' engines set for what they lack, by defaults."""
        for item in fields(self):
            if getattr(self, item.name) is None and item.default_factory is not MISSING:
                setattr(self, item.name, item.default_factory())
            elif getattr(self, item.name) is None:
                setattr(self, item.name, item.default)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids)

    @property
    def completion_length(self) -> int:
        return len(self.completion_ids)

    def to_message(self) -> Message:
        """Return the answer as an OpenAI assistant message."""
        message: Message = {"role": "assistant", "content": self.content or None}
        if not self.tool_calls:
            message["content"] = self.content
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class InferenceEngine(Protocol):
    """Anything that answers chat messages; users of the rLLM framework know it as `RolloutEngine`."""

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: Any
    ) -> ModelOutput:
        """Sample one answer. `params` are fields of `SamplingParams`, and request fields that an engine may ignore.

        Raises:
            PromptTooLongError: if the prompt leaves no room for an answer.
            InferenceError: if the engine refuses or fails otherwise.
        """
        ...


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output of a streaming engine since the last delta."""

    text: str
    """New text of the answer's content."""
    token_ids: list[int]
    logprobs: list[float]
    reasoning: str = ""
    """New text of its reasoning, which precedes the content."""
    prompt_ids: Sequence[int] = ()
    """Ids of the prompt, in the first delta, so that a stream that is cut can be recorded."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    """See `ModelOutput`."""


class FullEngine(InferenceEngine, Protocol):
    """An engine with all optional methods; `offers` tests for one of them."""

    def stream_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[JSONMapping] | None = None, **params: Any
    ) -> AsyncIterator[OutputDelta | ModelOutput]:
        """Yield deltas as they are sampled, then the whole answer as the last item.

        Text that may still become a tool call or a stop string is held back. Closing the iterator cancels the
        generation.
        """
        ...

    def continued_prompt(
        self,
        known_ids: Sequence[int],
        messages: Sequence[Message],
        num_known: int,
        *,
        tools: Sequence[JSONMapping] | None = None,
        template_kwargs: JSONMapping | None = None,
        appended_text: str = "",
    ) -> Sequence[int]:
        """Return the prompt for the next answer; see `rllm.parser.continuation.Continuation.prompt_ids`.

        An engine with this method takes prompts as `prompt_token_ids`: a list, or an `array` for a later turn.
        """
        ...

    def lost(self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> tuple[str, ...]:
        """Return the kinds of content that the engine's chat template leaves out of the prompt."""
        ...

    def check_request(self, request: JSONMapping) -> None:
        """Check a chat request for fields that must not be ignored.

        An engine with this method has the next two as well, and takes `top_logprobs`.

        Raises:
            ParameterError: naming the first field that this engine refuses.
        """
        ...

    def ignored(self, request: JSONMapping) -> list[str]:
        """Return the fields of a chat request that have no effect here, as keys of `rllm.inference.parameters`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes in UTF-8, possibly part of a character."""
        ...


def offers(engine: object, method: str) -> TypeGuard[FullEngine]:
    """Return whether an engine has an optional method of `FullEngine`."""
    return callable(getattr(engine, method, None))


RolloutEngine = InferenceEngine


def output_of_answer(response: JSONMapping, sampling: JSONObject) -> ModelOutput:
    """Return the first choice of a chat completion, without its tokens if they are unusable.

    Raises:
        TokenMismatchError: if its ids and log-probabilities contradict each other.
    """
    choice = response["choices"][0]
    message = choice["message"]
    tokens = tokens_of_choice(response, choice, 0)
    usable = tokens.problem is None
    facts = response.get("rllm") or {}
    usage = response.get("usage") or {}
    content = text_of(message)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    stop_reason = choice.get("stop_reason")  # vLLM reports a stop token by its id here
    return ModelOutput(
        id=str(response.get("id") or ""),
        text=join_reasoning(reasoning, content),
        content=content,
        reasoning=reasoning,
        tool_calls=message.get("tool_calls") or [],
        prompt_ids=list(tokens.prompt_ids) if usable else [],
        completion_ids=tokens.response_ids if usable else [],
        logprobs=tokens.logprobs if usable else [],
        logprobs_kind=facts.get("logprobs_kind", "unknown"),
        finish_reason=choice.get("finish_reason"),
        stop_string=stop_reason if isinstance(stop_reason, str) else None,
        weight_version=facts.get("weight_version"),
        weight_updates=(facts.get("weight_updates") or [[]])[0],
        template_hash=facts.get("template_hash"),
        sampling=sampling,
        metrics={name: float(usage[name]) for name in ("prompt_tokens", "completion_tokens") if usage.get(name)},
    )


def continued_prompt(
    engine: InferenceEngine,
    known_ids: Sequence[int],
    messages: Sequence[Message],
    num_known: int,
    request: JSONMapping,
    *,
    appended_text: str = "",
) -> Sequence[int] | None:
    """Continue a prompt with any engine; tools and template arguments come from the request.

    Returns `None` if the engine takes messages only, or if its template cannot continue from there.
    """
    if not offers(engine, "continued_prompt"):
        return None
    try:
        return engine.continued_prompt(
            known_ids,
            messages,
            num_known,
            tools=request.get("tools"),
            template_kwargs=request.get("chat_template_kwargs"),
            appended_text=appended_text,
        )
    except ConfigError as error:
        logger.debug("a conversation of %d messages is rendered again, not continued: %s", len(messages), error)
        return None


def lost_in_prompt(engine: object, messages: Sequence[Message], tools: Sequence[JSONMapping] | None) -> tuple[str, ...]:
    """Return the kinds of content that the template of an engine or upstream leaves out; none if it renders nothing."""
    return engine.lost(messages, tools) if offers(engine, "lost") else ()
