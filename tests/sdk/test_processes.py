"""Whose calls a process pool makes that serves several rollouts."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from rllm.sdk import propagation
from rllm.sdk.context import Session, session

from .conftest import ModelServer


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", sorted({"fork", "spawn"} & set(multiprocessing.get_all_start_methods())))
def test_each_job_belongs_to_the_session_that_it_was_submitted_in(server: ModelServer, method: Any) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:

        def ask(text: str) -> None:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            answer = pool.submit(httpx.post, f"{server.base_url}/chat/completions", json=body).result(60)
            assert answer.json()["choices"][0]["message"]["content"] == text

        with propagation.installed():
            with Session({"task": "sum"}, name="first", base_url=server.base_url):
                ask("one")
            with Session(name="second", base_url=server.base_url) as outer, session(agent="judge") as inner:
                ask("two")
        ask("outside")
    assert [item.headers.get("x-rllm-session") for item in server.received] == ["first", "second", None]
    stamps = [json.loads(unquote(item.headers["x-rllm-metadata"])) for item in server.received[:2]]
    assert [(stamp.get("task"), stamp.get("agent")) for stamp in stamps] == [("sum", None), (None, "judge")]
    assert stamps[1]["session_uids"][:2] == [outer._uid, inner._uid], "as of a call that is made here"
