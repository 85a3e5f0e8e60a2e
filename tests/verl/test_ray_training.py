"""Whole runs whose rollouts are on Ray: a user's project on a cluster of two nodes, and how a run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
AGENT = """
import os, time
from openai import OpenAI

from wording import question_of  # a neighbour

client = OpenAI()  # made before any rollout


def answer(word, log, sleep=0.0):
    said = client.chat.completions.create(model="any", messages=[{"role": "user", "content": question_of(word)}])
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {os.getcwd()}\\n")
    time.sleep(sleep)
    return float(len(said.choices[0].message.content or "") % 2)
"""
SCRIPT = """
import os, sys
from rllm.agents.chat_agent import ChatAgent
from rllm.environments.base.single_turn_env import SingleTurnEnvironment
from rllm.trainer import AgentTrainer
from rllm.workflows.simple_workflow import SimpleWorkflow


def reward(task, said):
    with open(task["log"], "a") as file:
        file.write(f"{os.getpid()} {os.getcwd()}\\n")
    return float(len(said) % 2)


class Speaker(ChatAgent):
    def response_to_action(self, response):
        return response


def own_client(question, log, base_url):
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    said = client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}])
    return reward({"log": log}, said.choices[0].message.content or "")


DOORS = {
    "function": {"agent_run_func": own_client},
    "agent": {"agent_class": Speaker, "env_class": SingleTurnEnvironment, "env_args": {"reward_fn": reward}},
    "workflow": {"workflow_class": SimpleWorkflow, "workflow_args": {"reward_function": reward}},
}
tasks = [{"question": word, "log": sys.argv[2]} for word in ("fig", "kiwi")]
AgentTrainer(train_dataset=tasks, config=sys.argv[3:], **DOORS[sys.argv[1]]).train()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of a head and another node; this process is not connected."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What a user has: an agent's file with a neighbour, in a folder of the project, and a script."""
    root = tmp_path / "project"
    (root / "agents").mkdir(parents=True)
    (root / "agents" / "agent.py").write_text(AGENT)
    (root / "agents" / "wording.py").write_text("def question_of(word):\n    return f'say {word}'\n")
    (root / "train.py").write_text(SCRIPT)
    return root


def settings(model_folder: Path, run_dir: Path, *more: str) -> list[str]:
    sizes = ["num_steps=2", "tasks_per_step=2", "rollout.group_size=4", "rollout.max_tokens=6", "eval.at_start=false"]
    return [f"model.path={model_folder}", "model.device=cpu", f"run_dir={run_dir}", "trackers=[jsonl]", *sizes, *more]


def rllm_train(project: Path, data: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "rllm", "train", "agents/agent.py:answer", "--data", str(data), *arguments]


def tasks_of(tmp_path: Path, **more: Any) -> tuple[Path, Path]:
    """A file of tasks, and the file in which their rollouts write who made them, and where."""
    data, log = tmp_path / "tasks.jsonl", tmp_path / "log"
    data.write_text("".join(json.dumps({"word": word, "log": str(log), **more}) + "\n" for word in ("fig", "kiwi")))
    return data, log


def done(command: list[str], project: Path) -> None:
    run = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def who(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def test_a_project_trains_on_other_nodes_as_it_does_here(
    address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path)
    here = rllm_train(project, data, *settings(model_folder, tmp_path / "here"))
    done(here, project)
    log.unlink()
    on_nodes = ["rollout.runner=ray", f"ray.address={address}", f"ray.working_dir={project}"]
    done(rllm_train(project, data, *settings(model_folder, tmp_path / "there"), *on_nodes), project)
    made = who(log)
    assert len(made) == 2 * 2 * 4
    assert len({pid for pid, _ in made}) == 2
    assert all(Path(folder) != project for _, folder in made), "each node has a copy"
    rewards = [
        [line["rollout/reward"] for line in lines(tmp_path / run) if "rollout/reward" in line]
        for run in ("here", "there")
    ]
    assert rewards[0] == pytest.approx(rewards[1])


@pytest.mark.parametrize("door", ["function", "agent", "workflow"])
def test_every_door_of_a_script_is_made_on_the_nodes(
    door: str, address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    config = settings(model_folder, tmp_path / "run", "rollout.runner=ray", f"ray.address={address}")
    done([sys.executable, "train.py", door, str(log), *config], project)
    assert len({pid for pid, _ in who(log)}) == 2
    steps = [line for line in lines(tmp_path / "run") if "rollout/reward" in line]
    assert [line["rollout/num_failed"] for line in steps] == [0, 0]
    assert all(line["tokens/trained"] > 0 for line in steps)


def test_workers_of_verl_and_rollouts_share_a_cluster(
    address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path)
    config = settings(model_folder, tmp_path / "run", "rollout.runner=ray", "verl.timeout_s=400")
    done(rllm_train(project, data, "--backend", "verl", "--ray-address", address, *config), project)
    assert len({pid for pid, _ in who(log)}) == 2
    steps = [line for line in lines(tmp_path / "run") if "rollout/reward" in line]
    assert [line["rollout/num_failed"] for line in steps] == [0, 0]
    assert all("policy/loss" in line for line in steps)


def until(holds: Callable[[], Any]) -> Any:
    for _ in range(3000):
        if value := holds():
            return value
        time.sleep(0.1)
    raise AssertionError("it never came true")


def begun(command: list[str], project: Path, log: Path) -> tuple[subprocess.Popen[bytes], set[int]]:
    """A driver whose rollouts are under way, and the processes that make them."""
    driver = subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(who(log)) >= 4 or driver.poll() is not None)
    assert driver.poll() is None
    return driver, {int(pid) for pid, _ in who(log)}


def all_gone(pids: set[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_process_outlives_its_driver_on_a_cluster(
    number: signal.Signals, address: str, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path, sleep=300.0)
    on_nodes = ["rollout.runner=ray", f"ray.address={address}", "rollout.timeout_s=1000"]
    command = rllm_train(project, data, *settings(model_folder, tmp_path / "run"), *on_nodes)
    driver, pids = begun(command, project, log)
    driver.send_signal(number)
    assert driver.wait(timeout=120) != 0
    until(lambda: all_gone(pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_cluster_that_was_started_for_a_run_ends_with_it(
    number: signal.Signals, project: Path, model_folder: Path, tmp_path: Path
) -> None:
    data, log = tasks_of(tmp_path, sleep=300.0)
    command = rllm_train(project, data, *settings(model_folder, tmp_path / "run"), "rollout.runner=ray")
    driver, pids = begun(command, project, log)
    pids |= {child.pid for child in psutil.Process(driver.pid).children(recursive=True)}
    driver.send_signal(number)
    driver.wait(timeout=120)
    until(lambda: all_gone(pids))


def test_a_submitted_job_is_not_sent_twice(
    address: str, project: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `ray job submit --working-dir .` does: it starts the program in the copy, with RAY_ADDRESS and the job's
    environment set, and a second working directory would be a contradiction."""
    data, log = tasks_of(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", address)
    shipped = {"working_dir": str(project)}
    upload = (
        "import json, ray; from ray._private.runtime_env.working_dir import upload_working_dir_if_needed as up;"
        "ray.init(log_to_driver=False);"
        f"print(json.dumps(up({shipped!r}, include_gitignore=True, scratch_dir={str(tmp_path)!r})))"
    )
    told = subprocess.run(
        [sys.executable, "-c", upload], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    environment = {"runtime_env": json.loads(told.splitlines()[-1])}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(environment))
    done(rllm_train(project, data, *settings(model_folder, tmp_path / "run"), "rollout.runner=ray"), project)
    assert {Path(folder).name for _, folder in who(log)} == {
        environment["runtime_env"]["working_dir"].removeprefix("gcs://").removesuffix(".zip")
    }
    assert os.environ["RAY_ADDRESS"] == address
