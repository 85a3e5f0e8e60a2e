"""`rllm run`, with real programs and a scripted server."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.store import open_store
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine, decode, encode
from rllm.testing.scripted_server import ScriptedServer
from rllm.types import Episode

from ..waiting import wait_for
from .conftest import here, rllm

PROGRAM = """
import json, os, sys, urllib.request

def ask(messages, **options):
    body = {"model": "policy", "messages": messages, **options}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)["choices"][0]["message"]

messages = []
for text in sys.argv[1].split(","):
    messages.append({"role": "user", "content": text})
    messages.append(ask(messages))
    print(messages[-1]["content"])
print(os.environ.get("RLLM_UPSTREAM_API_KEY"), os.environ.get("RLLM_GATEWAY_API_KEY"), file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def shout(messages):
    return str(messages[-1]["content"]).upper()


@pytest.fixture(scope="module")
def server():
    with ScriptedServer(ScriptedEngine(shout)) as server:
        yield server


@pytest.fixture
def run(server, work):
    (work / "program.py").write_text(PROGRAM)

    def run(*arguments):
        return here("run", "--upstream", server.base_url, *arguments, cwd=work)

    return run


def asking(text, code=0):
    return ["--", sys.executable, "-S", "program.py", text, str(code)]


def test_output_passes_through_and_calls_are_summarized(run, work):
    done = run("--session", "mine", "--metadata", "task=7", *asking("hi,again"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "HI\nAGAIN\n"
    assert "rllm run: 2 calls in session mine" in done.stderr
    assert "ended with exit code 0" in done.stderr
    assert "rllm traces show mine --store sqlite:///traces.db" in done.stderr
    store = open_store("traces.db")
    traces = store.by_session("mine")
    assert [trace.response_ids[:-1] for trace in traces] == [encode("HI"), encode("AGAIN")]
    assert store.session("mine").metadata["task"] == "7"
    store.close()


def test_episode_is_printed_and_written_as_json(run, work):
    done = run("--json", "--out", "episode.json", *asking("hi,again"))
    episode = Episode.from_dict(json.loads(done.stdout))
    assert json.loads((work / "episode.json").read_text()) == json.loads(done.stdout)
    [trajectory] = episode.trajectories
    assert [step.response_ids[:-1] for step in trajectory.steps] == [encode("HI"), encode("AGAIN")]
    assert trajectory.steps[1].prompt_ids[: len(trajectory.steps[0].prompt_ids)] == trajectory.steps[0].prompt_ids
    assert episode.info["program"]["stdout"] == "HI\nAGAIN\n"
    assert episode.info["program"]["exit_code"] == 0
    assert "HI\nAGAIN\n" in done.stderr


def test_unwritable_file_does_not_lose_the_episode(run):
    done = run("--json", "--out", "/proc/episode.json", *asking("hi"))
    assert done.returncode == 1
    assert len(Episode.from_dict(json.loads(done.stdout)).trajectories[0].steps) == 1
    assert "rllm run: 1 call in session" in done.stderr
    assert "--out /proc/episode.json cannot be written" in done.stderr


def test_continued_session_yields_only_new_calls(run):
    run("--session", "mine", *asking("hi"))
    done = run("--session", "mine", *asking("again"))
    assert "1 call in session mine" in done.stderr


def test_exit_code_is_that_of_the_program(run):
    assert run(*asking("hi", 3)).returncode == 3
    assert run("--allow-no-calls", "--", "/bin/sh", "-c", "kill -ABRT $$").returncode == 128 + signal.SIGABRT


def test_program_without_calls_fails(run):
    done = run("--session", "mine", "--", "echo", "hi")
    assert done.returncode == 1
    assert "echo ended with exit code 0" in done.stderr
    assert "made no model call that reached the gateway" in done.stderr
    assert re.search(r"OPENAI_BASE_URL .*http://127.0.0.1:\d+/sessions/mine/v1", done.stderr)
    done = run("--", "/bin/sh", "-c", "exit 9")
    assert done.returncode == 9
    assert "made no model call" in done.stderr
    done = run("--allow-no-calls", "--", "echo", "hi")
    assert done.returncode == 0
    assert "0 calls" in done.stderr


def test_call_without_session_is_assigned_to_the_program(run):
    """The program knows only the gateway's address and the key, like one that builds its URL from host and port."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    url = "$(echo $OPENAI_BASE_URL | cut -d/ -f1-3)/v1/chat/completions"
    key = '-H "authorization: Bearer $OPENAI_API_KEY"'
    curl = f"curl -s {url} {key} -H 'content-type: application/json' -d '{body}'"
    done = run("--session", "mine", "--", "sh", "-c", curl)
    assert done.returncode == 0, done.stderr
    assert "1 call in session mine" in done.stderr


@pytest.mark.slow
def test_non_text_output_passes_through_unchanged(server, work):
    printed = "import sys; sys.stdout.buffer.write(b'caf\\xe9 \\xff\\x00\\r\\n\\xe2\\x82')"
    run = ["run", "--base-url", server.base_url, "--allow-no-calls", "--out", "e.json", "--"]
    light = "import sys; sys.modules.update(openai=None, torch=None); from rllm.__main__ import main; main()"
    command = [sys.executable, "-c", light, *run, sys.executable, "-S", "-c", printed]
    done = subprocess.run(command, capture_output=True, cwd=work, check=True)
    assert done.stdout == b"caf\xe9 \xff\x00\r\n\xe2\x82"
    assert json.loads((work / "e.json").read_text())["info"]["program"]["stdout"] == "caf\ufffd \ufffd\0\r\n\ufffd"


def test_program_is_stopped_at_its_deadline(run):
    done = run("--timeout", "0.5", "--", "sleep", "600")
    assert done.returncode == 124
    assert "timed out and was stopped" in done.stderr


LEAVES = """
import os, pathlib, time, urllib.parse
from http.client import HTTPConnection

url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
call = HTTPConnection(url.hostname, url.port)
body = '{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
retries = {"X-Stainless-Retry-Count": "0", "X-Stainless-Timeout": "0.001"}  # a client that timed out may come back
headers = {"Content-Type": "application/json", **retries}
call.request("POST", url.path + "/chat/completions", body, headers)
while not pathlib.Path("asked").exists():
    time.sleep(0.01)
"""


def test_call_in_flight_at_exit_is_in_the_episode(work):
    def latency_s(messages):
        (work / "asked").touch()
        return 0.3

    (work / "leaves.py").write_text(LEAVES)
    with ScriptedServer(ScriptedEngine(shout, latency_s=latency_s)) as server:
        program = ["--", sys.executable, "-S", "leaves.py"]
        done = here("run", "--upstream", server.base_url, "--out", "episode.json", *program, cwd=work)
    assert done.returncode == 0, done.stderr
    [trajectory] = json.loads((work / "episode.json").read_text())["trajectories"]
    assert [decode(step["response_ids"][:-1]) for step in trajectory["steps"]] == ["HI"]


def test_long_output_is_truncated_in_the_middle(run):
    done = run("--max-output", "10", "--allow-no-calls", "--", "seq", "1", "10000")
    assert done.stdout == "1\n2\n3\n[... 48884 bytes left out ...]\n0000\n"
    assert "48884 bytes are left out" in done.stderr


def test_operator_keys_are_not_passed_to_the_program(run, monkeypatch):
    monkeypatch.setenv("RLLM_UPSTREAM_API_KEY", "theirs")
    monkeypatch.setenv("RLLM_GATEWAY_API_KEY", "theirs")
    assert "None None" in run(*asking("hi")).stderr


def test_running_gateway_gets_a_session_key(work):
    (work / "program.py").write_text(PROGRAM + "\n")
    store = MemoryTraceStore()
    with GatewayServer(store, EngineUpstream(ScriptedEngine(shout), "m"), GatewayConfig(api_key="secret")) as gateway:
        at = ["run", "--gateway", gateway.url, "--session", "mine"]
        done = here(*at, "--api-key", "secret", *asking("hi"), cwd=work)
        assert done.returncode == 0, done.stderr
        assert "1 call in session mine" in done.stderr
        assert "rllm traces show" not in done.stderr
        refused = here(*at, *asking("hi"), cwd=work)
    assert len(store.by_session("mine")) == 1
    assert refused.returncode == 1
    assert "401" in refused.stderr


def test_side_calls_are_counted_and_excluded(run, work):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    beside = PROGRAM.replace("messages = []", "messages = []\nask([{'role': 'user', 'content': 'A title?'}])")
    (work / "program.py").write_text(beside.replace("ask(messages)", f"ask(messages, tools=[{tool}])"))
    done = run("--json", *asking("hi"))
    assert "rllm run: 1 call in session" in done.stderr
    assert "1 side call (without tools: 1)" in done.stderr
    assert json.loads(done.stdout)["trajectories"][0]["info"]["num_side_calls"] == 1


@pytest.mark.slow
def test_local_model_can_be_used(work, policy):
    (work / "program.py").write_text(PROGRAM.replace("**options}", '"max_tokens": 8, **options}'))
    done = here("run", "--model", policy, "--json", *asking("hi"), cwd=work)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trajectories"][0]["steps"][0]["response_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_signal_stops_the_program_and_its_children(server, work, number):
    script = "setsid sleep 600 & echo $! > child; echo $$ > leader; wait"
    run = ["run", "--upstream", server.base_url, "--session", "mine", "--", "/bin/sh", "-c", script]
    command = [sys.executable, "-m", "rllm", *run]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (work / "leader").exists() and (work / "leader").read_text().strip())
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors == (
        "rllm run: stopped; its calls are stored in session mine\n"
        "  traces     rllm traces show mine --store sqlite:///traces.db\n"
    )
    for name in ("child", "leader"):
        assert not Path(f"/proc/{int((work / name).read_text())}").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--", "ls"], "no model is given"),
        (["--gateway", "127.0.0.1:8080", "--", "ls"], "--gateway 127.0.0.1:8080"),
        (["--gateway", "http://127.0.0.1:9", "--", "ls"], "cannot be reached"),
        (["--gateway", "http://127.0.0.1:9", "--model", "m", "--", "ls"], "--model m would have no effect"),
        (["--timeout", "0", "--", "ls"], "--timeout=0.0"),
        (["--metadata", "task", "--", "ls"], "--metadata task: use KEY=VALUE"),
        (["--gateway", "http://127.0.0.1:9", "--store", "my.db", "--", "ls"], "--store my.db would have no effect"),
        (
            ["--model", "m", "--upstream-kind", "openai", "--", "ls"],
            "--upstream-kind openai would have no effect without",
        ),
        (["--model", "m", "--chat-template", "m", "--", "ls"], "--chat-template m would have no effect without"),
        (["--model", "m", "--tokenizer", "m", "--", "ls"], "--tokenizer m would have no effect without --base-url"),
        (["--out", "no/folder/e.json", "--", "ls"], "--out no/folder/e.json"),
        (["--out", ".", "--", "ls"], "--out .: "),
    ],
)
def test_errors_name_the_remedy(fails, work, arguments, named):
    code, errors = fails("run", *arguments)
    assert code in (1, 2)
    assert named in errors


def test_missing_program_is_reported(run):
    done = run("--", "no-such-program")
    assert done.returncode == 2
    assert "'no-such-program' cannot be started" in done.stderr


@pytest.mark.slow
def test_command_has_its_own_help():
    done = rllm("run", "--help", cwd=Path.cwd(), env={**os.environ, "COLUMNS": "200"})
    assert "{-- COMMAND}..." in done.stdout
