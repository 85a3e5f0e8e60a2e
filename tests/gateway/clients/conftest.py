"""The versions of the clients are checked only if the path has other versions before the installed ones."""

from __future__ import annotations

import os

import pytest

if os.environ.get("RLLM_CLIENTS") is None:
    collect_ignore_glob = ["test_versions.py"]


@pytest.fixture
def anthropic_client(serve):
    """Anthropic's client of a session, with the same base URL that OpenAI's clients get."""
    import anthropic

    def client(served, **options):
        http = anthropic.DefaultHttpxClient(verify=False)
        given = {"base_url": served.server.session_url("s"), "api_key": "unused", "max_retries": 0, **options}
        return served.stack.enter_context(anthropic.Anthropic(http_client=http, **given))

    return client
