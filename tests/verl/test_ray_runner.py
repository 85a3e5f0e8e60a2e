"""Rollouts on a real cluster of two nodes: one episode for each attempt, whichever process dies."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rllm.config.schema import RayConfig
from rllm.engine.ray_actors import MAX_LOSSES, RayRolloutRunner
from rllm.engine.ray_cluster import OF_CODE, alive_nodes, joined, packed
from rllm.engine.request import RolloutRequest
from rllm.errors import ConfigError, TokenMismatchError
from rllm.trainer.config import load_config
from rllm.trainer.rollout_sources import WorkflowSource
from rllm.trainer.rollouts import check_rollouts
from rllm.types import Episode

sys.path.append(str(Path(__file__).parent))
import ray_rollouts

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A cluster of a head and another node, to which this process is connected."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    with joined(cluster.address):
        yield cluster
    cluster.shutdown()


def runner(log: Path | None = None, **settings: Any) -> RayRolloutRunner:
    return RayRolloutRunner(partial(ray_rollouts.opening, log), **settings)


def attempts(*tasks: dict[str, Any]) -> list[RolloutRequest]:
    return [RolloutRequest(task=task, task_id=f"task-{number}") for number, task in enumerate(tasks)]


def lines(log: Path) -> list[list[str]]:
    if not log.exists():
        return []
    return [line.split() for line in log.read_text().splitlines()]


def made_by(episode: Episode) -> int:
    return episode.trajectories[0].info["value"]


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2400):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came true")


async def test_episodes_are_in_order_from_all_nodes(two_nodes: Any) -> None:
    with runner(max_concurrent=8) as running:
        received: list[str] = []
        episodes = await running.run(attempts(*[{}] * 40), on_episode=lambda episode: received.append(episode.task_id))
        again = await running.run(attempts({"num_tokens": 200_000}))
    assert [episode.task_id for episode in episodes] == [f"task-{number}" for number in range(40)]
    assert sorted(received) == sorted(episode.task_id for episode in episodes)
    assert len({made_by(episode) for episode in episodes}) == 2
    assert os.getpid() not in {made_by(episode) for episode in episodes}
    assert again[0].trajectories[0].steps[0].response_ids == list(range(200_000))


async def test_failures_retries_and_deadlines_match_a_single_machine(two_nodes: Any, tmp_path: Path) -> None:
    tasks = [
        {"do": "respond_busy_once", "mark": tmp_path / "mark"},
        {"sleep": 3600},
        {"do": "hold_a_lock"},
        {"lock": threading.Lock()},
        {},
    ]
    with runner(tmp_path / "log", timeout_s=10.0, retry_delay_s=0.0) as running:
        episodes = await running.run(attempts(*tasks))
    assert [episode.failed for episode in episodes] == [False, True, True, True, False]
    slow, returned, sent = (episode.info["error"] for episode in episodes[1:4])
    assert slow["type"] == "RolloutTimeout"
    assert "in rollout" in slow["traceback"]
    assert "the episode cannot be sent to another machine" in returned["message"]
    assert "the task cannot be sent to another machine" in sent["message"]
    found = Counter(task_id for task_id, _, _ in lines(tmp_path / "log"))
    assert found == {"task-0": 2, "task-1": 1, "task-2": 1, "task-4": 1}
    closed = await asyncio.to_thread(lambda: list(tmp_path.glob("closed-*")))
    assert len(closed) == 2, "each process closed its source of rollouts"


async def test_token_mismatch_stops_the_run(two_nodes: Any) -> None:
    with runner() as running, pytest.raises(TokenMismatchError, match="3 ids and 2 log-probabilities"):
        await running.run(attempts({"do": "mismatch"}, {"sleep": 3600}))


async def test_attempt_that_kills_its_process_is_abandoned_without_affecting_others(
    two_nodes: Any, tmp_path: Path
) -> None:
    tasks: list[dict[str, Any]] = [{"sleep": 0.2} for _ in range(20)]
    tasks[3] = {"do": "die"}
    with runner(tmp_path / "log", max_concurrent=8) as running:
        episodes = await running.run(attempts(*tasks))
    assert [episode.task_id for episode in episodes] == [f"task-{number}" for number in range(20)]
    assert [number for number, episode in enumerate(episodes) if episode.failed] == [3]
    assert f"{MAX_LOSSES} processes died while they ran it" in episodes[3].info["error"]["message"]
    found = lines(tmp_path / "log")
    assert sum(task_id == "task-3" for task_id, _, _ in found) == MAX_LOSSES
    assert len({session for _, _, session in found}) == len(found), "each attempt has its own session"
    for episode in episodes:
        if not episode.failed:
            assert [episode.session_id] == [session for name, _, session in found if name == episode.task_id][-1:]


async def test_hanging_process_is_ended(two_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.engine.ray_actors.STUCK_MARGIN_S", 5.0)
    with runner(timeout_s=5.0, num_retries=0, spread=RayConfig(num_actors=1)) as running:
        stuck, fine = await running.run(attempts({"do": "block"}, {"sleep": 0.5}))
    assert stuck.info["error"]["type"] == "RolloutTimeout"
    assert "blocking call" in stuck.info["error"]["message"]
    assert fine.failed is False or fine.info["error"]["type"] == "RolloutTimeout"


async def test_cancelling_a_run_stops_its_rollouts_and_processes(two_nodes: Any, tmp_path: Path) -> None:
    with runner(tmp_path / "log") as running:
        run = asyncio.create_task(running.run(attempts({"sleep": 3600}, {"sleep": 3600})))
        await until(lambda: len(lines(tmp_path / "log")) == 2)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        pids = {int(pid) for _, pid, _ in lines(tmp_path / "log")}
        (done,) = await running.run(attempts({}))
    assert not done.failed
    gone = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(gone, timeout=60)[1] == []


async def test_number_of_processes_and_concurrency_are_configurable(two_nodes: Any, tmp_path: Path) -> None:
    with runner(tmp_path / "log", spread=RayConfig(num_actors=3, concurrency=2)) as running:
        assert running.max_concurrent == 6
        episodes = await running.run(attempts(*[{"sleep": 0.3}] * 12))
    assert len({made_by(episode) for episode in episodes}) == 3


async def test_failed_start_error_names_the_node_and_the_remedy(two_nodes: Any) -> None:
    addresses = {node.address for node in alive_nodes()}
    greedy = runner(spread=RayConfig(cpus_per_actor=64, start_timeout_s=3.0))
    with pytest.raises(ConfigError, match=r"node (\S+) .*lower ray.cpus_per_actor") as message, greedy:
        pass
    assert any(address in str(message.value) for address in addresses)

    def broken() -> Any:
        import no_such_module_anywhere

        return no_such_module_anywhere

    with pytest.raises(ConfigError, match=r"node \S+ cannot run rollouts: ModuleNotFoundError: .*ray.working_dir"):
        RayRolloutRunner(broken).__enter__()


def test_unpicklable_code_is_reported(two_nodes: Any) -> None:
    client = threading.Lock()

    def local() -> Any:
        return client

    class Walker:
        def step(self) -> Any:
            return client

    named = r"the agent cannot be sent .*it uses 'client' \(lock\).*agent.py"
    with pytest.raises(ConfigError, match=named):
        RayRolloutRunner(local)
    with pytest.raises(ConfigError, match=named):
        check_rollouts(load_config(["rollout.runner=ray"]), WorkflowSource(workflow_class=Walker))  # type: ignore[arg-type]
    holds_itself = SimpleNamespace(client=client)
    holds_itself.cycle = SimpleNamespace(back=holds_itself)
    with pytest.raises(ConfigError, match=r"the agent cannot be sent to another machine .*cannot pickle"):
        packed(holds_itself, "the agent", OF_CODE)


async def test_attempts_survive_a_lost_node_and_count_once(two_nodes: Any, tmp_path: Path) -> None:
    log, node = tmp_path / "log", two_nodes.list_all_nodes()[-1]
    with runner(log, max_concurrent=8) as running:
        run = asyncio.create_task(running.run(attempts(*[{"sleep": 0.5}] * 60)))
        await until(lambda: len(lines(log)) >= 20)
        await asyncio.to_thread(two_nodes.remove_node, node, allow_graceful=False)
        episodes = await run
    assert [episode.task_id for episode in episodes] == [f"task-{number}" for number in range(60)]
    assert not any(episode.failed for episode in episodes)
    found = lines(log)
    begun = Counter(task_id for task_id, _, _ in found)
    assert len(begun) == 60
    assert 60 < len(found) <= 60 + 8, "only attempts under way on the lost node were repeated"
    assert len({episode.session_id for episode in episodes}) == 60
    assert {episode.session_id for episode in episodes} <= {session for _, _, session in found}
