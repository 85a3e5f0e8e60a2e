"""Errors as agents see them: every failure becomes an error object with the right status."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal, TypeAlias

from rllm.errors import (
    CaptureError,
    ConfigError,
    InferenceError,
    PromptTooLongError,
    RLLMError,
    SessionDeletedError,
    StoreError,
    TokenMismatchError,
)
from rllm.types import JSONObject

STOPPED = "the gateway was stopped before the answer was complete"
"""Message with which the tasks of calls are cancelled at shutdown."""
CONTEXT_OVERFLOW = "context_length_exceeded"
"""Error code of a prompt that is too long: clients shorten the conversation when they read it."""


class GatewayError(RLLMError):
    """A request that the gateway answers with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        code: str | int | None = None,
        param: str | None = None,
        details: JSONObject | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")
        self.code = code
        self.param = param
        self.details = details
        """Further facts for the client, in dialects that have a field for them."""
        self.retry_after_s = retry_after_s
        self.allow = allow
        """Methods that the path allows, for an answer with status 405."""

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(math.ceil(self.retry_after_s))}
        if self.status == 408:  # The rest of the request may never come.
            headers["connection"] = "close"
        return headers if self.allow is None else {**headers, "allow": self.allow}

    def to_dict(self, *, prompt: str = "messages") -> JSONObject:
        """Return OpenAI's error object; `prompt` is the prompt's name in the format of the request."""
        param = prompt if self.code == CONTEXT_OVERFLOW else self.param
        return {"error": {"message": str(self), "type": self.type, "param": param, "code": self.code}}


class DeclinedError(GatewayError):
    """A request for a feature that the client tries first and can do without; it leaves no failed trace."""


UpstreamFault: TypeAlias = Literal["call", "refused", "unreachable", "broke_off", "lost"]
"""Kind of a failure of an upstream. `call`: another server would fail too. `refused`: it cannot answer now.
`unreachable`: there is no connection. `broke_off`: the connection was lost during the call. `lost`: it will not come
back."""


class UpstreamError(InferenceError):
    """Error answer of an inference server; `details` is its own OpenAI error object, if it sent one."""

    def __init__(
        self,
        message: str,
        *,
        status_code: int = 502,
        details: JSONObject | None = None,
        fault: UpstreamFault = "call",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status_code=status_code)
        self.details = details or {}
        self.fault: UpstreamFault = fault
        self.retry_after_s = retry_after_s
        """Seconds after which to retry, if the server named them."""


def was_stopped(error: BaseException | None) -> bool:
    """Return whether an error ends a call because the gateway stops."""
    return isinstance(error, asyncio.CancelledError) and error.args == (STOPPED,)


def to_gateway_error(error: Exception) -> GatewayError:
    """Return the error that the agent gets for any failure of a call."""
    match error:
        case GatewayError():
            return error
        case PromptTooLongError():
            return _too_long(str(error))
        case UpstreamError(details={"code": str(code)}) if code == CONTEXT_OVERFLOW:
            return _too_long(str(error))
        case UpstreamError():
            given = error.details
            return GatewayError(
                error.status_code,
                str(error),
                type=_if_is(str, given.get("type")),
                code=_if_is((str, int), given.get("code")),
                param=_if_is(str, given.get("param")),
                retry_after_s=error.retry_after_s,
            )
        case InferenceError():
            return GatewayError(error.status_code, str(error), code="upstream_error")
        case ConfigError():
            param = getattr(error, "param", None)
            return GatewayError(400, str(error), param=_if_is(str, param))
        case TokenMismatchError() | CaptureError():
            return GatewayError(502, str(error), code="tokens_unusable")
        case SessionDeletedError():
            return GatewayError(410, str(error), code="session_deleted")
        case StoreError():
            return GatewayError(500, f"the call was not acknowledged, because its trace was not stored: {error}")
        case _:
            return GatewayError(500, f"the gateway failed: {type(error).__name__}: {error}", code="internal_error")


def _if_is(kinds: type | tuple[type, ...], value: Any) -> Any:
    """Return the value if it has the type that clients expect, otherwise `None`."""
    return value if isinstance(value, kinds) else None


def _too_long(message: str) -> GatewayError:
    """Return the error of a prompt that is too long; some clients recognize the code, and some only these words."""
    if "maximum context length" not in message:
        message = f"This model's maximum context length is exceeded: {message}"
    return GatewayError(400, message, code=CONTEXT_OVERFLOW)
