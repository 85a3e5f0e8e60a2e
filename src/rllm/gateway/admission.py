"""Who is let in: whoever presents the gateway's key or a session's, or names a session where its name is enough."""

from __future__ import annotations

from collections.abc import Mapping

from rllm.gateway.config import GatewayConfig
from rllm.gateway.errors import GatewayError
from rllm.gateway.identity import Caller, authorization_of, authorize, openly_named
from rllm.gateway.sessions import Sessions
from rllm.gateway.web_pages import check_no_page_asks


def key_holder(headers: Mapping[bytes, bytes], config: GatewayConfig) -> Caller:
    """Whose key is presented, where one is needed.

    Raises:
        GatewayError: 401, if it is none of this gateway's; 403, if none is needed, but a web page asks.
    """
    if config.api_key is None:
        check_no_page_asks(headers)
    return authorize(authorization_of(headers), config.api_key)


async def caller_of(
    path: str | None, headers: Mapping[bytes, bytes], config: GatewayConfig, sessions: Sessions
) -> Caller:
    """Who sends a request with these headers; `path` is the session that its URL names, if it names one.

    Raises:
        GatewayError: 401 or 403, if it is nobody who may.
    """
    try:
        return key_holder(headers, config)
    except GatewayError:
        named = openly_named(path, headers) if config.api_key is not None and config.session_ids_admit else None
        if named is None or not await sessions.has_begun(named):
            raise
        return Caller(session=named, is_bound=True)
