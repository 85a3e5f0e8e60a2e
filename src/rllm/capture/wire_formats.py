"""Registry of the wire formats that agents speak: one row per format.

A row holds what every layer needs without loading a translation: which requests are model calls, how keys are sent, and
which environment variables direct clients to a gateway. The translation of a format is in `rllm.gateway.dialects`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """One wire format."""

    name: str
    """Its name in logs, metrics and tables of parameters."""
    dialect: str
    """Class that translates it, as `package.module:Class`; only the gateway loads it."""
    calls: tuple[str, ...]
    """Paths, after the version, of requests that sample from a model; `{model}` is a model's name in the path."""
    counts: tuple[str, ...] = ()
    """Paths of requests for the number of tokens of a prompt."""
    version: str = "v1"
    """Version in the paths of its clients."""
    key_header: str = "authorization"
    """Header in which its clients send their key."""
    key_parameter: str = ""
    """Query parameter in which they may send it instead."""
    client_headers: tuple[str, ...] = ()
    """Headers that only clients of this format send, with any request."""
    base_url_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for a base URL; `{root}` is the URL of the gateway or the session."""
    key_variables: tuple[str, ...] = ()
    """Environment variables for the key."""
    token_variables: tuple[str, ...] = ()
    """Environment variables for a token that takes precedence over the key, if it is set."""


WIRE_FORMATS = (
    WireFormat(
        name="chat",
        dialect="rllm.gateway.dialects.chat:ChatDialect",
        calls=("/chat/completions",),
        base_url_variables={
            "OPENAI_BASE_URL": "{root}/v1",
            "OPENAI_API_BASE": "{root}/v1",  # LlamaIndex reads only this one.
            "HOSTED_VLLM_API_BASE": "{root}/v1",  # LiteLLM's route hosted_vllm/
        },
        key_variables=("OPENAI_API_KEY", "HOSTED_VLLM_API_KEY"),
    ),
    WireFormat(
        name="completions",
        dialect="rllm.gateway.dialects.chat:CompletionsDialect",
        calls=("/completions",),
    ),
    WireFormat(
        name="responses",
        dialect="rllm.gateway.dialects.responses:ResponsesDialect",
        calls=("/responses",),
        counts=("/responses/input_tokens",),
    ),
    WireFormat(
        name="messages",
        dialect="rllm.gateway.dialects.messages:MessagesDialect",
        calls=("/messages",),
        counts=("/messages/count_tokens",),
        key_header="x-api-key",
        client_headers=("anthropic-version",),
        base_url_variables={"ANTHROPIC_BASE_URL": "{root}"},  # Its clients add /v1 themselves.
        key_variables=("ANTHROPIC_API_KEY",),
        token_variables=("ANTHROPIC_AUTH_TOKEN",),
    ),
    WireFormat(
        name="google",
        dialect="rllm.gateway.dialects.google:GoogleDialect",
        calls=("/models/{model}:generateContent", "/models/{model}:streamGenerateContent"),
        counts=("/models/{model}:countTokens",),
        version="v1beta",
        key_header="x-goog-api-key",
        key_parameter="key",
        client_headers=("x-goog-api-client", "x-goog-api-key"),
        base_url_variables={"GOOGLE_GEMINI_BASE_URL": "{root}"},
        # Not GOOGLE_API_KEY as well: clients warn where both are set, and that one may be for other services.
        key_variables=("GEMINI_API_KEY",),
    ),
)


def path_pattern(template: str) -> str:
    """Return the regular expression of a path template, with a group for each name in braces."""
    return re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(template))


_CALLS = "|".join(path_pattern(call) for row in WIRE_FORMATS for call in row.calls).replace("?P<model>", "?:")
_MODEL_CALL = re.compile(rf"(?:{_CALLS})\Z")


def model_call_in(path: str) -> str | None:
    """Return the part of a path after its version, if it is a model call in any wire format."""
    found = _MODEL_CALL.search(path)
    return found[0] if found else None
