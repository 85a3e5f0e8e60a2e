"""The viewer over a PostgreSQL server that several gateways share."""

from __future__ import annotations

import pytest

from rllm.store import open_store
from rllm.types import OUTCOME_KEY
from rllm.viewer.runs import Runs

from ..store.conftest import REQUIRED, postgres, postgres_url  # noqa: F401  # Fixtures.
from .conftest import Client
from .run_folders import outcome_of, trace_of

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(
        not REQUIRED, reason="`make test-postgres` runs these: the store's own tests start a server already"
    ),
]


def test_rollouts_and_tokens_on_a_server_are_shown(look: Client, postgres_url: str) -> None:  # noqa: F811
    trace = trace_of("one")
    about = {"task_id": "t@0.0.0", "index": 0, "split": "train", "training_step": 0, OUTCOME_KEY: outcome_of(trace)}
    with open_store(postgres_url) as store:
        store.open_session("one", about).result(60)
        store.add([trace]).result(60)
    client = look(postgres_url)
    assert "1 in all" in client.get("/run/store/rollouts").text
    assert "Four" in client.get("/run/store/episode/one").text
    assert client.get("/run/store/tokens/one/data.json").json()["ids"] == [1, 2, 3, 4, 5]
    assert postgres_url not in client.get("/").text, "a URL may contain a password"


def test_unreachable_server_shows_a_message(look: Client) -> None:
    answer = look("postgresql://nobody@127.0.0.1:1/none").get("/run/store/rollouts")
    assert answer.status_code == 503
    assert "check that the server runs" in answer.text


def test_two_servers_have_distinct_names() -> None:
    runs = Runs(["postgresql://a/one", "postgresql://b/two"])
    assert sorted(run.name for run in runs.all()) == ["store", "store-2"]
