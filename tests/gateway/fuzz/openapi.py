"""OpenAPI description of the gateway's routes, for schemathesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.capture.wire_formats import WIRE_FORMATS

_ANY = {"type": "object", "additionalProperties": True}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {}},
}
_TOKEN_ID = {"type": "integer", "minimum": 0}
_SAMPLED = {
    "model": {"type": "string"},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "stream": {"type": "boolean"},
    "tools": {"type": "array", "items": _ANY},
}
_BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "required": ["messages"],
        "properties": {
            **_SAMPLED,
            "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
            "max_tokens": {"type": "integer", "minimum": 1},
            "n": {"type": "integer", "minimum": 1, "maximum": 128},
            "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        },
    },
    "completions": {
        "required": ["prompt"],
        "properties": {
            **_SAMPLED,
            "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TOKEN_ID}]},
            "max_tokens": {"type": "integer", "minimum": 1},
        },
    },
    "responses": {
        "required": ["input"],
        "properties": {
            **_SAMPLED,
            "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": _ANY}]},
            "instructions": {"type": "string"},
            "previous_response_id": {"type": "string"},
            "max_output_tokens": {"type": "integer", "minimum": 1},
        },
    },
    "messages": {
        "required": ["messages", "max_tokens"],
        "properties": {
            **_SAMPLED,
            "system": {"anyOf": [{"type": "string"}, {"type": "array", "items": _ANY}]},
            "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
            "max_tokens": {"type": "integer", "minimum": 1},
            "stop_sequences": {"type": "array", "items": {"type": "string"}},
        },
    },
}
_CONTENT = {"type": "object", "properties": {"role": {"type": "string"}, "parts": {"type": "array", "items": _ANY}}}
_BODIES["generateContent"] = _BODIES["streamGenerateContent"] = {
    "required": ["contents"],
    "properties": {
        "contents": {"type": "array", "minItems": 1, "items": _CONTENT},
        "systemInstruction": _CONTENT,
        "generationConfig": _ANY,
        "tools": {"type": "array", "items": _ANY},
    },
}
_BODIES["countTokens"] = {"properties": {"contents": {"type": "array", "items": _CONTENT}}}
_BODIES["responses/input_tokens"] = _BODIES["responses"]
_BODIES["messages/count_tokens"] = {**_BODIES["messages"], "required": ["messages"]}
_WHOLE_OR_STREAMED = ("application/json", "text/event-stream")
_SESSION_BODY = {
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": 256},
        "metadata": _ANY,
        "sampling": _ANY,
    },
    "additionalProperties": False,
}
_PATH = {"in": "path", "required": True}
_SESSION = {**_PATH, "name": "session_id", "schema": {"type": "string", "minLength": 1, "maxLength": 256}}
_MODEL = {**_PATH, "name": "model_id", "schema": {"type": "string", "minLength": 1}}
_PAGE = [
    {"in": "query", "name": name, "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}}
    for name in ("limit", "offset")
]


def openapi(*, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of every route except those of operators."""
    paths: dict[str, dict[str, Any]] = {}
    for prefix, session in (("", []), ("/sessions/{session_id}", [_SESSION])):
        for row in WIRE_FORMATS:
            for path in (*row.calls, *row.counts):
                body = {"type": "object", **_BODIES[path.lstrip("/").rpartition(":")[2]]}
                named = [*session, *([{**_MODEL, "name": "model"}] if "{model}" in path else [])]
                posted = _operation(named, body=body, media_types=_WHOLE_OR_STREAMED)
                paths[f"{prefix}/{row.version}{path}"] = {"post": posted}
        for version in sorted({row.version for row in WIRE_FORMATS}):
            paths[f"{prefix}/{version}/models"] = {"get": _operation(session)}
            paths[f"{prefix}/{version}/models/{{model_id}}"] = {"get": _operation([*session, _MODEL])}
    paths |= {
        "/sessions": {"get": _operation(_PAGE), "post": _operation(body={"type": "object", **_SESSION_BODY})},
        "/sessions/{session_id}": {"get": _operation([_SESSION]), "delete": _operation([_SESSION])},
        "/sessions/{session_id}/traces": {"get": _operation([_SESSION])},
        "/metrics": {"get": _operation(media_types=("text/plain",))},
        "/healthz": {"get": _operation()},
        "/readyz": {"get": _operation()},
    }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "rllm gateway", "version": "1"},
        "paths": paths,
    }
    if needs_key:
        described["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        described["security"] = [{"key": []}]
    return described


def _operation(
    parameters: list[dict[str, Any]] | None = None,
    *,
    body: Mapping[str, Any] | None = None,
    status: int = 200,
    media_types: Sequence[str] = ("application/json",),
) -> dict[str, Any]:
    error = {"description": "why not", "content": {"application/json": {"schema": _ERROR}}}
    answer = {"description": "the answer", "content": {media_type: {} for media_type in media_types}}
    operation: dict[str, Any] = {"parameters": parameters or [], "responses": {str(status): answer, "default": error}}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
