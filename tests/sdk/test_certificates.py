"""Certificates are read once for the clients of many rollouts, and clients that differ keep what is theirs."""

from __future__ import annotations

import ssl
from typing import Any

import certifi
import httpx
import httpx2
import pytest

from rllm.sdk import propagation


def context_of(transport: Any) -> ssl.SSLContext:
    context: ssl.SSLContext = transport._pool._ssl_context
    return context


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_clients_of_rollouts_share_one_context(library: Any) -> None:
    with propagation.installed():
        transports = [library.HTTPTransport(), library.AsyncHTTPTransport(), library.Client()._transport]
        contexts = {context_of(transport) for transport in transports}
    assert len(contexts) == 1
    assert contexts.pop().verify_mode == ssl.CERT_REQUIRED
    assert context_of(library.HTTPTransport()) not in {context_of(transport) for transport in transports}


def test_clients_with_wishes_of_their_own_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ssl.create_default_context()
    with propagation.installed():
        shared = context_of(httpx.HTTPTransport())
        assert context_of(httpx.HTTPTransport(verify=own)) is own
        assert context_of(httpx.HTTPTransport(verify=False)).verify_mode == ssl.CERT_NONE
        assert context_of(httpx.HTTPTransport(trust_env=False)) is not shared
        monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
        assert context_of(httpx.HTTPTransport()) is not shared
