"""Checks of every node of a cluster before a run takes anything of it, and the plan of the run in words."""

from __future__ import annotations

import contextlib
import logging
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rllm._runtime.network import is_loopback
from rllm.backends.verl.cluster import shortage
from rllm.backends.verl.settings import on_cpu
from rllm.backends.verl.worker_config import demand_of
from rllm.config.schema import TrainConfig
from rllm.engine.ray_cluster import ClusterNode, alive_nodes, on_node, own_address, url_elsewhere
from rllm.errors import ConfigError, counted
from rllm.gateway.server import bind, url_of
from rllm.trainer.checkup import gpus_of_driver
from rllm.trainer.memory import checkpoint_bytes, worker_memory
from rllm.trainer.rollouts import joined_for
from rllm.trainer.run_folder import nearest_folder

logger = logging.getLogger(__name__)

SLOW_S = 50.0
"""Seconds after which nodes that have not answered are logged; usually all have by then."""
CONNECT_S = 5.0
FOR_ROLLOUTS = ("rllm", "ray")
FOR_WORKERS = ("torch", "transformers", "verl")
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Question:
    """Facts that each node is asked for."""

    packages: tuple[str, ...]
    folders: tuple[str, ...] = ()
    """Folders that it has to see."""
    disk: str | None = None
    """A folder of the file system whose free space is wanted."""
    url: str | None = None
    """`http://host:port` that it has to reach."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Facts about a node."""

    versions: Mapping[str, str | None]
    missing: Sequence[str] = ()
    disk_free: int = 0
    """Bytes."""
    unreached: str | None = None
    """Reason why the node cannot reach the URL."""
    gpus: Sequence[str] = ()
    """Name and memory of each."""


def answered(question: Question) -> Answer:
    """Return the facts about this node; runs on each node."""
    return Answer(
        versions={"python": platform.python_version(), **{name: _installed(name) for name in question.packages}},
        missing=[folder for folder in question.folders if not Path(folder).exists()],
        disk_free=shutil.disk_usage(nearest_folder(question.disk)).free,
        unreached=_why_unreached(question.url),
        gpus=gpus_of_driver(),
    )


def preflight(config: TrainConfig) -> list[str]:
    """Check every node of the cluster at once, and return the plan of the run, line by line.

    Raises:
        ConfigError: if the cluster cannot be joined or has too little, or if a node cannot do its part; with the node,
            the setting and the remedy.
    """
    with joined_for(config) as ray:
        nodes = alive_nodes()
        check_room(config, nodes)
        with _listening(config) as url:
            answers = _ask(ray, nodes, _question(config, url), config.ray.start_timeout_s)
    here = answered(Question(packages=_packages(config)))
    for node in nodes:
        check_node(node.address, answers[node.id], here, config)
    return plan(config, nodes, answers)


def _packages(config: TrainConfig) -> tuple[str, ...]:
    return FOR_ROLLOUTS + (FOR_WORKERS if config.backend == "verl" else ())


def _question(config: TrainConfig, url: str | None) -> Question:
    folders: list[Path] = []
    disk = None
    if config.backend == "verl":
        model = Path(config.model.path).expanduser()
        run = config.run_dir.absolute() if config.run_dir is not None else Path.cwd()
        folders = [folder for folder in (model, nearest_folder(str(run))) if folder.exists()]
        disk = str(run)
    return Question(
        packages=_packages(config), folders=tuple(str(folder.absolute()) for folder in folders), disk=disk, url=url
    )


@contextlib.contextmanager
def _listening(config: TrainConfig) -> Iterator[str | None]:
    """Listen at the gateway's address while nodes try to reach it."""
    if config.rollout.runner != "ray":
        yield None
        return
    host = own_address() if is_loopback(config.gateway.host) else config.gateway.host
    with bind(host, config.gateway.port) as listener:
        yield url_elsewhere(url_of(listener, host), host)


def _ask(ray: Any, nodes: Sequence[ClusterNode], question: Question, timeout_s: float) -> dict[str, Answer]:
    ask = ray.remote(num_cpus=0, max_retries=0)(answered)
    asked = {node.id: ask.options(**on_node(node)).remote(question) for node in nodes}
    ready, missing = ray.wait(list(asked.values()), num_returns=len(asked), timeout=min(SLOW_S, timeout_s))
    if missing and timeout_s > SLOW_S:
        slow = [node.address for node in nodes if asked[node.id] in missing]
        logger.warning("%s not answered for %g s: waiting until %g s", who_has(slow), SLOW_S, timeout_s)
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s - SLOW_S)
    answers: dict[str, Answer] = {}
    for node in nodes:
        if asked[node.id] not in ready:
            raise ConfigError(
                f"node {node.address} has not answered within ray.start_timeout_s={timeout_s:g}: see `ray status` and "
                "the logs in its Ray folder; a node that is overloaded or cannot make the environment of the program "
                "looks like that"
            )
        try:
            answers[node.id] = ray.get(asked[node.id])
        except ray.exceptions.RayError as error:
            reason = str(error).strip().rpartition("\n")[2]
            raise ConfigError(
                f"node {node.address} cannot run our code ({reason}): install there what is installed here, in the "
                "environment that its `ray start` ran in"
            ) from error
    return answers


def who_has(addresses: Sequence[str]) -> str:
    """Return `node 10.0.0.1 has` or `nodes 10.0.0.1, 10.0.0.2 have`."""
    return f"node {addresses[0]} has" if len(addresses) == 1 else f"nodes {', '.join(addresses)} have"


def check_room(config: TrainConfig, nodes: Sequence[ClusterNode]) -> None:
    """Check that enough nodes have the resources of verl's workers, in use or not.

    Raises:
        ConfigError: if fewer nodes than needed have these resources.
    """
    if config.backend != "verl":
        return
    demand = demand_of(config)
    has = [(node.address, int(node.num_cpus if demand.resource == "CPU" else node.num_gpus)) for node in nodes]
    fit = sum(number >= demand.workers_per_node for _, number in has)
    if fit < demand.num_nodes:
        found = "; ".join(f"node {address} has {counted(number, demand.resource)}" for address, number in has)
        raise ConfigError(
            f"{shortage(demand, fit)} ({found}): lower verl.workers_per_node or verl.num_nodes, or add nodes"
        )


def check_node(address: str, answer: Answer, here: Answer, config: TrainConfig) -> None:
    """Check the facts about a node.

    Raises:
        ConfigError: if a fact reported by a node does not fit; with the node, the setting and the remedy.
    """
    for name, expected in here.versions.items():
        found = answer.versions.get(name)
        if _matters(name, found) != _matters(name, expected):
            what = f"pip install '{name}=={expected}'" if name != "python" else f"use Python {expected}"
            raise ConfigError(
                f"node {address} has {name} {found or 'not installed'}, and here it is {expected}: {what} in the "
                "environment that its `ray start` ran in"
            )
    for folder in answer.missing:
        raise ConfigError(
            f"node {address} does not see {folder!r} (model.path or run_dir): put it on a file system that all nodes "
            "share, or at the same path on each"
        )
    if answer.unreached is not None:
        raise ConfigError(
            f"node {address} cannot reach the gateway of this machine ({answer.unreached}): set gateway.host to an "
            "address of this machine that the nodes reach, and gateway.port to a port that is open to them"
        )
    needed = checkpoint_bytes(config) if config.backend == "verl" else None
    if needed is not None and answer.disk_free < needed:
        raise ConfigError(
            f"node {address} has {answer.disk_free / GB:.1f} GB free at run_dir, and checkpoints take "
            f"{needed / GB:.1f} GB: lower keep_checkpoints, or set run_dir to a larger file system"
        )


def plan(config: TrainConfig, nodes: Sequence[ClusterNode], answers: Mapping[str, Answer]) -> list[str]:
    """Describe the nodes and what runs on each."""
    lines = [f"Ray cluster of {counted(len(nodes), 'node')}:"]
    for node in nodes:
        answer = answers[node.id]
        units = f"{counted(int(node.num_cpus), 'CPU')}, {counted(int(node.num_gpus), 'GPU')}"
        kind = f" ({answer.gpus[0]})" if answer.gpus else ""
        installed = " ".join(f"{name} {found}" for name, found in answer.versions.items())
        lines.append(f"  {node.address}: {units}{kind}, {answer.disk_free / GB:.0f} GB of disk; {installed}")
    return [*lines, *_roles(config, nodes), *worker_memory(config)]


def _roles(config: TrainConfig, nodes: Sequence[ClusterNode]) -> Iterator[str]:
    if config.backend == "verl":
        unit = "CPU" if on_cpu(config) else "GPU"
        is_one = config.verl.num_nodes * config.verl.workers_per_node == 1
        yield (
            f"training: {counted(config.verl.num_nodes, 'node')} x {counted(config.verl.workers_per_node, 'worker')}, "
            + (f"on a {unit}, holds the model" if is_one else f"a {unit} each, hold the model in pieces")
        )
    where = "a vLLM server" if config.model.engine == "vllm" else "the process of the trainer"
    yield f"sampling: {where}, on this machine"
    rollout = config.rollout
    if rollout.runner == "ray":
        number = config.ray.num_actors or len([node for node in nodes if node.num_cpus]) or len(nodes)
        processes = "1 process" if number == 1 else f"{number} processes"
        yield f"rollouts: {processes} on the nodes, {counted(rollout.max_concurrent, 'rollout')} under way at a time"
    else:
        yield f"rollouts: in the process of the trainer, {rollout.max_concurrent} under way at a time"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _matters(name: str, found: str | None) -> Any:
    """Return the part of a version that must be equal: for Python major and minor, as functions are sent."""
    return found.split(".")[:2] if name == "python" and found is not None else found


def _why_unreached(url: str | None) -> str | None:
    if url is None:
        return None
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{url}: {error}"
    return None
