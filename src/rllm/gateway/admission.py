"""Who is let in: whoever presents the gateway's key or a session's, or names a session whose random id is its key."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rllm.gateway.config import GatewayConfig
from rllm.gateway.identity import Caller, authorization_of, authorize, named_by_any_means, refused
from rllm.gateway.sessions import Sessions
from rllm.gateway.web_pages import check_no_page_asks

_RANDOM_ID = re.compile(r"(?:s-[0-9a-f]+-)?[0-9a-f]{32}")
"""Ids of sessions that commands and trainers begin, of 122 random bits."""


async def key_holder(headers: Mapping[bytes, bytes], config: GatewayConfig, sessions: Sessions) -> Caller:
    """Return whose key is presented, where one is needed.

    Raises:
        GatewayError: 401, if it is none of this gateway's, or its session was deleted; 403, if none is needed, but a web
            page asks.
    """
    if config.api_key is None:
        check_no_page_asks(headers)
    caller = authorize(authorization_of(headers), config.api_key)
    if caller.is_bound and caller.session is not None and await sessions.number_of(caller.session) != caller.number:
        raise refused()
    return caller


async def caller_of(
    path: str | None, headers: Mapping[bytes, bytes], config: GatewayConfig, sessions: Sessions
) -> Caller:
    """Return who sends a request with these headers; `path` is the session that its URL names, if it names one.

    Raises:
        GatewayError: 401 or 403, if the sender has no right to it.
    """
    if config.session_ids_admit and config.api_key is not None:
        named = named_by_any_means(path, headers)
        if named is not None and _RANDOM_ID.fullmatch(named) and await sessions.has_begun(named):
            return Caller(session=named, is_bound=True)
    return await key_holder(headers, config, sessions)
