"""`rllm traces` and `rllm store`."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rllm import cli
from rllm.store import open_store
from rllm.types import Trace


def trace_of(id, session_id, **changes):
    values = {
        "call_id": id,
        "model": "tiny",
        "messages": [{"role": "user", "content": "Is [red] a colour?\\"}],
        "response": {"role": "assistant", "content": "half \ud83e, whole"},
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
        "weight_version": 3,
    }
    return Trace(id=id, session_id=session_id, **(values | changes))


CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A file in the current directory with two sessions."""
    monkeypatch.chdir(tmp_path)
    with open_store("traces.db") as store:
        store.open_session("first", {"task_id": "t"}, created_at=1e9).result()
        store.add([trace_of("a", "first"), trace_of("b", "first", response={"role": "assistant", "tool_calls": CALLS})])
        store.add([trace_of("c", "second", error="the upstream broke off", finish_reason=None)])
    return tmp_path / "traces.db"


def run(*arguments):
    """Return the output of a command that succeeds."""
    done = CliRunner().invoke(cli.app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("encoding", [pytest.param("utf-8", marks=pytest.mark.slow), "ascii"])
def test_unprintable_characters_are_escaped(store, encoding):
    done = subprocess.run(
        [sys.executable, "-m", "rllm", "traces", "show", "first", "a"],
        env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "half \\ud83e, whole" in done.stdout


def test_sessions_are_listed_newest_first(store):
    lines = run("traces", "list").splitlines()
    assert [line.split()[1] for line in lines if "second" in line or "first" in line] == ["second", "first"]
    assert "task_id=t" in run("traces", "list", "--offset", 1)
    newest, oldest = json.loads(run("traces", "list", "--json", "--store", store))
    assert (newest["id"], newest["num_traces"]) == ("second", 1)
    assert oldest == {"id": "first", "created_at": 1e9, "num_traces": 2, "metadata": {"task_id": "t"}}


def test_session_is_shown_call_by_call(store):
    shown = run("traces", "show", "first")
    for word in ("task_id=t", "3 + 2", "stop", "whole", "[calls add]"):
        assert word in shown
    assert "the upstream broke off" in run("traces", "show", "second")
    assert [call["id"] for call in json.loads(run("traces", "show", "first", "--json"))] == ["a", "b"]


def test_single_call_is_shown_with_its_messages(store):
    assert "Is [red] a colour?\\\n" in run("traces", "show", "first", "a")
    assert json.loads(run("traces", "show", "first", "a", "--json"))["logprobs"] == [-0.5, -0.25]
    assert json.loads(run("traces", "show", "a", "--json"))["logprobs"] == [-0.5, -0.25]


def test_calls_with_malformed_messages_are_shown(store):
    """Agents and servers may send malformed messages."""
    odd = {"role": "assistant", "content": 7, "tool_calls": ["x", {"function": "add"}, {"function": {"name": "sub"}}]}
    with open_store(str(store)) as opened:
        opened.add([trace_of("odd", "third", messages=["hello", {"content": [1]}, odd], response=odd)]).result()
    for arguments in (["third"], ["third", "odd"], ["odd"]):
        assert "7 [calls ?] [calls ?] [calls sub]" in run("traces", "show", *arguments)
    assert "hello" in run("traces", "show", "odd")


def test_traces_are_exported(store, tmp_path):
    assert run("traces", "export", "all.jsonl") == "3 traces written to all.jsonl\n"
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b", "c"]
    run("traces", "export", "some.parquet", "--session", "second", "--session", "second")
    assert pq.read_table(tmp_path / "some.parquet").column("id").to_pylist() == ["c"]
    run("traces", "export", "some.txt", "--format", "jsonl")
    assert len((tmp_path / "some.txt").read_text().splitlines()) == 3


def test_sessions_are_deleted(store):
    assert run("traces", "delete", "first", "first") == "1 session with 2 traces deleted\n"
    with open_store(str(store), read_only=True) as opened:
        assert [info.id for info in opened.sessions()] == ["second"]


def test_old_sessions_are_pruned(store):
    assert run("store", "prune", "traces.db", "--keep-days", 365) == "1 session with 2 traces deleted\n"
    assert run("store", "prune", "--max-gb", 1) == "0 sessions with 0 traces deleted\n"


def test_copying_a_store_twice_adds_nothing(store):
    assert run("store", "migrate", store, "copy.db").startswith("2 sessions with 3 traces copied and compared; 0 were")
    assert run("store", "migrate", store, "sqlite:///copy.db").startswith(
        "0 sessions with 0 traces copied and compared; 2"
    )
    with open_store(str(store)) as before, open_store("copy.db") as after:
        assert after.sessions() == before.sessions()
        assert after.by_session("first") == before.by_session("first")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["traces", "list", "--store", "."], "is a directory: name a file in it"),
        (["traces", "list", "--store", "sqlite:///."], "is a directory: name a file in it"),
        (["traces", "list", "--store", "nowhere.db"], "no such file"),
        (["traces", "list", "--store", "memory:"], "store='memory:'"),
        (["traces", "list", "--store", "mysql://host/db"], "'mysql'"),
        (["traces", "show", "nope"], "session='nope' is not in the store; the latest there are second, first"),
        (["traces", "show", "first", "nope"], "trace='nope' is not in session 'first'"),
        (["traces", "delete", "first", "nope"], "session='nope' is not in the store"),
        (["traces", "export", "out.csv"], "ends in neither .jsonl nor .parquet"),
        (["traces", "export", "no/folder/out.jsonl"], "cannot be written (No such file or directory)"),
        (["traces", "export", "traces.db/out.jsonl"], "cannot be written (Not a directory)"),
        (["store", "migrate", "traces.db", "traces.db"], "both 'traces.db': name two stores"),
        (["store", "migrate", "nowhere.db", "copy.db"], "no such file"),
        (["store", "migrate", "traces.db", "."], "is a directory"),
        (["store", "prune"], "--keep-days"),
        (["store", "prune", "--keep-days", "0"], "--keep-days=0.0"),
        (["gateway", "--upstream", "http://127.0.0.1:1", "--port", "0", "--store", "."], "is a directory"),
        (["gateway", "--upstream", "http://127.0.0.1:1", "--max-gb", "-1"], "--max-gb=-1.0"),
    ],
)
def test_user_errors_print_a_message_and_exit_with_code_2(store, fails, arguments, message):
    code, error = fails(*arguments)
    assert (code, message in error) == (2, True), error
    with open_store(str(store), read_only=True) as opened:
        assert [info.num_traces for info in opened.sessions()] == [1, 2]


def test_failures_exit_with_code_1(store, fails):
    with open_store("other.db") as other:
        other.add([trace_of("else", "first")]).result()
    code, error = fails("store", "migrate", "traces.db", "other.db")
    assert (code, "'first' differs between source and target" in error) == (1, True), error
    store.write_bytes(b"garbage " * 1000)
    code, error = fails("traces", "list")
    assert (code, "file is not a database" in error) == (1, True), error


@pytest.mark.slow
def test_gateway_deletes_old_sessions(store):
    command = [sys.executable, "-m", "rllm", "gateway", "--upstream", "http://127.0.0.1:9", "--store", str(store)]
    with subprocess.Popen(
        [*command, "--port", "0", "--keep-days", "365"], stdout=subprocess.PIPE, text=True
    ) as process:
        url = re.search(r"http://\S+", process.stdout.readline()).group()
        assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
        deadline = time.monotonic() + 60
        while len(json.loads(run("traces", "list", "--json"))) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert [session["id"] for session in json.loads(run("traces", "list", "--json"))] == ["second"]
