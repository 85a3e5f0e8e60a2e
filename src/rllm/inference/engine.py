"""What an inference engine is: chat messages in, one sampled answer with its exact tokens out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from rllm.errors import ConfigError
from rllm.types import LogprobsKind, Message


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one answer is sampled. Every value is sent explicitly, so that no server-side default changes the policy."""

    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    max_tokens: int | None = None
    """`None`: as many as the context has room for."""
    stop: tuple[str, ...] = ()
    """The answer's text ends before the first of these strings; their sampled ids stay in the answer's ids."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature <= 10.0, "temperature", self.temperature, "use a number from 0 to 10")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "use a number above 0, up to 1")
        _require(self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "use -1 (all tokens) or at least 1")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "use at least 1")

    @classmethod
    def from_request(cls, request: Mapping[str, Any]) -> SamplingParams:
        """The sampling fields of an OpenAI chat request; other fields are ignored, absent and null ones take defaults.

        Raises:
            ConfigError: if a value has the wrong type or is out of range.
        """
        values: dict[str, Any] = {}
        for name, convert in _REQUEST_FIELDS.items():
            if request.get(name) is not None:
                try:
                    values[name] = convert(request[name])
                except (TypeError, ValueError) as error:
                    raise ParameterError(f"{name}={request[name]!r}: {error}", name) from error
        if (limit := values.pop("max_completion_tokens", None)) is not None:
            values["max_tokens"] = limit
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


class ParameterError(ConfigError):
    """A field of a request that cannot be what it is; `param` is its key, see `rllm.inference.parameters`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise ParameterError(f"{name}={value!r}: {remedy}", name)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("use a number")
    return float(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("use an integer")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(item, str) and item for item in strings):
        raise TypeError("use a non-empty string or a list of them")
    return strings


_REQUEST_FIELDS: dict[str, Any] = {
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
    """What the call is filed under (`Trace.id`, `Step.id`) by whoever keeps it: of a server's answer, its id; else empty."""
    text: str = ""
    """The decoded answer, with its special tokens left out. Of a server that tells reasoning apart, with the reasoning in its
    tags; the tool calls that a server has read are not in it."""
    content: str = ""
    """The text without reasoning and tool calls."""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In the OpenAI format: `{"id", "type": "function", "function": {"name", "arguments"}}`."""
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One per completion id."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Of each completion id, the likeliest ids in its place and their log-probabilities, where these were asked for."""
    logprobs_kind: LogprobsKind = "unknown"
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls` or `abort`."""
    stop_string: str | None = None
    """The one that ended it, if one did."""
    weight_version: int | None = None
    weight_updates: list[list[int]] = field(default_factory=list)
    """Where an update of the weights fell into the answer; see `rllm.types.Trace`."""
    template_hash: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """The sampling parameters that were really used."""
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Engines of users may say `None` for what they do not have."""
        for item in fields(self):
            if getattr(self, item.name) is None:
                setattr(self, item.name, item.default if item.default is not MISSING else item.default_factory())  # type: ignore[operator]

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids)

    @property
    def completion_length(self) -> int:
        return len(self.completion_ids)

    def to_message(self) -> Message:
        """The answer as an OpenAI assistant message."""
        message: Message = {"role": "assistant", "content": self.content or None}
        if not self.tool_calls:
            message["content"] = self.content
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class InferenceEngine(Protocol):
    """Anything that answers chat messages; `RolloutEngine` is the name that users of the rLLM framework know."""

    async def get_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **params: Any
    ) -> ModelOutput:
        """Sample one answer. `params` are the fields of `SamplingParams`, and request fields an engine may ignore.

        Raises:
            PromptTooLongError: if the prompt leaves no room for an answer.
            InferenceError: for everything else that the engine refuses or fails.
        """
        ...


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What a streaming engine has to say since the last delta."""

    text: str
    """New text of the answer's content."""
    token_ids: list[int]
    logprobs: list[float]
    reasoning: str = ""
    """New text of its reasoning, which comes before."""
    prompt_ids: Sequence[int] = ()
    """Of the prompt: with the first delta, from an engine that knows them by then, for the record of a stream that is cut."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    """See `ModelOutput`; of each of the token ids."""


@runtime_checkable
class StreamingInferenceEngine(Protocol):
    """An engine that can also answer piece by piece."""

    def stream_model_response(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **params: Any
    ) -> AsyncIterator[OutputDelta | ModelOutput]:
        """Deltas as they are sampled, then the whole answer as the last item. Text that may still become a tool call
        or a stop string is held back. Closing the iterator early cancels the generation."""
        ...


@runtime_checkable
class ContinuingEngine(Protocol):
    """An engine that can go on from the very tokens of an earlier answer; it takes them as `prompt_token_ids`."""

    def continued_prompt(
        self,
        known_ids: Sequence[int],
        messages: Sequence[Message],
        num_known: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        written_on: str = "",
    ) -> list[int]:
        """`known_ids`, which are the first `num_known` messages as they were sampled, and what the template prints behind
        them to ask for the next answer.

        The agent may have written on behind the last of their answers, which a stop string ended: `written_on` is the end of
        its content from there on, the stop string included.

        Raises:
            ConfigError: if the template refuses the messages, or cannot be rendered append-only here.
        """
        ...


@runtime_checkable
class DetailedEngine(Protocol):
    """An engine that knows which request fields change its answers, and the bytes of its tokens; takes `top_logprobs`."""

    def check_request(self, request: Mapping[str, Any]) -> None:
        """Check a chat request for fields without which its answer would be another than the client expects.

        Raises:
            ParameterError: naming the first one that this engine refuses.
        """
        ...

    def ignored(self, request: Mapping[str, Any]) -> list[str]:
        """Return the fields of a chat request that ask for something and change nothing here, as keys of
        `rllm.inference.parameters`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes in UTF-8, which may be a part of a character."""
        ...


RolloutEngine = InferenceEngine
