"""`TASKS --agent NAME --sandbox BACKEND`: mistakes are rejected before a model is loaded, and rollouts are explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer
from rllm.viewer.app import create_app
from rllm.viewer.runs import Runs

from ..sandbox.conftest import DEBIAN, backend_or_skip, no_sandbox_is_left
from ..tasks.conftest import write_task
from .conftest import here

__all__ = ["no_sandbox_is_left"]

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


@pytest.mark.parametrize("command", ["eval", "train"])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--agent", "codex"], "the tasks are missing"),
        (["nowhere", "--agent", "terminus"], "rllm: tasks='nowhere': no such folder"),
        ([str(EXAMPLES), "--agent", "terminis"], "did you mean 'terminus'"),
        ([str(EXAMPLES), "--sandbox", "podmen"], "did you mean 'podman'"),
        (["--env", "tasks:x?agnt=codex"], "env=tasks:x: agnt is not a parameter; did you mean 'agent'"),
        (["--env", "tasks:x", "--agent", "codex"], "--env 'tasks:DIR?agent=codex'"),
        (["my_agent.py:agent", "--data", "tasks.jsonl", "sandbox.cpus=2"], "sandbox.cpus=2"),
    ],
)
def test_invalid_arguments_are_rejected(command, arguments, named, work, fails):
    code, printed = fails(command, *arguments, "--model", "some/model")
    assert code == 2
    assert named in printed
    assert "loading" not in printed


@pytest.mark.sandbox
def test_rollout_is_evaluated_and_explained(tmp_path):
    backend_or_skip("local")
    solution = (EXAMPLES / "log-report" / "solution" / "solve.sh").read_text()
    engine = ScriptedEngine([f"```sh\n{solution}```", "done"])
    with ScriptedServer(engine, model="big") as server:
        given = [
            str(EXAMPLES / "log-report"),
            "--base-url",
            server.base_url,
        ]  # by default terminus, in the sandbox local
        done = here("eval", *given, "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["accuracy"]["value"], report["tasks"][0]["cost"]["num_calls"]) == (1.0, 2.0)
    explained = here("explain", "out", f"{report['tasks'][0]['task_id']}:0", cwd=tmp_path)
    assert "files changed: added report.csv" in explained.stdout
    assert "+service,events,errors" in explained.stdout


@pytest.mark.sandbox
def test_oracle_needs_no_model_and_is_not_trained(tmp_path, fails):
    backend_or_skip("local")
    done = here("eval", str(EXAMPLES), "--agent", "oracle", "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"]["value"] == 1.0
    with TestClient(create_app(Runs([str(tmp_path / "out")])), base_url="http://127.0.0.1") as client:
        page = client.get("/run/out").text
    for name, value in (("env", f"tasks:{EXAMPLES}?agent=oracle"), ("agent", "oracle"), ("sandbox", "local")):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    code, printed = fails("train", str(EXAMPLES), "--agent", "oracle", "--model", "some/model")
    assert (code, "agent=oracle" in printed, "loading" in printed) == (2, True, False)


AGENT = """\
import asyncio

from openai import AsyncOpenAI

KILL = {"local": "kill -9 {sandbox._process.pid}", "podman": "podman kill {sandbox.id}"}


async def agent(instruction, sandbox, base_url, api_key):
    await sandbox.exec("echo yes > done")
    if "silently" in instruction:
        return
    if "elsewhere" in instruction:
        called = await sandbox.exec(["python3", "-c", "import urllib.request as r; r.urlopen('http://example.com/v1')"])
        raise RuntimeError(called.stderr[-200:])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": instruction}])
    if "kill" in instruction:
        command = KILL["BACKEND"].format(sandbox=sandbox)
        await (await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.DEVNULL)).wait()
        await sandbox.exec("true")
    if "raise" in instruction:
        raise KeyError("no idea")
"""
NO_IMAGE = f"FROM {DEBIAN}\nRUN " + "echo a line of a long log; " * 20 + "echo no such package; exit 3\n"
FAILING = {
    "unbuilt": ({"environment/Dockerfile": NO_IMAGE}, "SandboxError", "no such package"),
    "unscored": ({"tests/test.sh": "#!/bin/sh\necho checked\n"}, "RewardError", "/logs/verifier/reward.txt"),
    "nan": ({"tests/test.sh": "#!/bin/sh\necho nan > /logs/verifier/reward.txt\n"}, "RewardError", "finite"),
    "silent": ({"instruction.md": "Work silently."}, "CaptureError", "sandbox.open_route(base_url)"),
    "elsewhere": ({"instruction.md": "Call elsewhere."}, "AgentError", "sandbox.open_route(base_url)"),
    "killed": ({"instruction.md": "Be the one to kill."}, "SandboxError", "sandbox.memory_mb"),
    "raised": ({"instruction.md": "Then raise."}, "AgentError", "KeyError"),
}


@pytest.mark.sandbox
@pytest.mark.parametrize("backend", ["local", "podman"])
def test_failed_rollouts_are_explained(backend, tmp_path):
    """Each failure is attributed and has a remedy, none counts as a reward of 0, and the other task is solved."""
    backend_or_skip(backend)
    (tmp_path / "own_agent.py").write_text(AGENT.replace("BACKEND", backend))
    for name, (files, _, _) in {"solved": ({}, "", ""), **FAILING}.items():
        write_task(tmp_path / "tasks" / name, files)
    with ScriptedServer(ScriptedEngine(["Fine."]), model="big") as server:
        given = ["tasks", "--agent", "own_agent.py:agent", "--sandbox", backend, "--base-url", server.base_url]
        done = here("eval", *given, "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    counts = ("num_rollouts", "num_correct", "num_failed", "num_unscored", "mean_reward")
    assert [report[name] for name in counts] == [8, 1, 7, 0, 1.0]
    [reason] = [reason for reason in report["failures"] if "CaptureError" in reason["text"]]
    assert "agent=own_agent.py:agent made no model call" in reason["text"]
    verdicts = {}
    for name, (_, kind, remedy) in FAILING.items():
        explained = json.loads(here("explain", "out", f"{name}:0", "--json", cwd=tmp_path).stdout)
        error = explained["error"]
        assert (error["type"], remedy in error["message"]) == (kind, True), error
        assert len(error["message"]) < 1500
        assert explained["rewards"] == {"agent": None}
        if name not in ("raised", "elsewhere"):  # their tracebacks have lines of the user's code
            assert error["traceback"] == ""
        assert "rllm/engine" not in error["traceback"]
        verdicts[name] = explained["verdicts"]["agent"]
    for name in FAILING.keys() - {"unbuilt", "killed"}:
        assert verdicts[name]["files changed"] == "added done (4 bytes)"
        assert "+yes" in verdicts[name]["diff"]
    assert verdicts["unscored"]["verifier output"] == "checked"
    assert "agent" in verdicts["killed"]["seconds"]
    assert "files changed" not in verdicts["killed"]
    shown = here("explain", "out", "unscored:0", cwd=tmp_path).stdout
    assert "reward unscored" in shown
    assert "verifier output: checked" in shown
