"""Checks of every node of a cluster before a run uses it, and a description of what runs where."""

from __future__ import annotations

import contextlib
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from rllm.backends.verl.cluster import shortage
from rllm.backends.verl.settings import on_cpu
from rllm.backends.verl.worker_config import demand_of
from rllm.config.schema import TrainConfig
from rllm.engine.ray_cluster import ClusterNode, alive_nodes, on_node, own_address, url_elsewhere
from rllm.errors import ConfigError, counted
from rllm.gateway.config import is_loopback
from rllm.gateway.server import bind, url_of
from rllm.tracking.about import nearest_folder
from rllm.trainer.checkup import gpus_of_driver
from rllm.trainer.rollouts import joined_for

CONNECT_S = 5.0
FOR_ROLLOUTS: tuple[str, ...] = ("rllm", "ray")
FOR_WORKERS = ("torch", "transformers", "verl")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Facts about a node."""

    versions: Mapping[str, str | None]
    missing: Sequence[str] = ()
    unreached: str | None = None
    """Reason why the node cannot reach the URL."""
    gpus: Sequence[str] = ()


def answered(packages: Sequence[str], folders: Sequence[str] = (), url: str | None = None) -> Answer:
    """Return the facts about this node: versions, which folders it does not see, whether it reaches the URL."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    unreached = None
    if url is not None:
        address = urlsplit(url)
        try:
            socket.create_connection((address.hostname, address.port), timeout=CONNECT_S).close()
        except OSError as error:
            unreached = f"{url}: {error}"
    return Answer(
        versions=versions,
        missing=[folder for folder in folders if not Path(folder).exists()],
        unreached=unreached,
        gpus=gpus_of_driver(),
    )


def preflight(config: TrainConfig) -> list[str]:
    """Check every node of the cluster at once, and return the plan of the run, line by line.

    Raises:
        ConfigError: if the cluster cannot be joined or is too small, or if a node cannot do its part; with the node,
            the setting and the remedy.
    """
    packages, folders = FOR_ROLLOUTS, list[str]()
    if config.backend == "verl":
        packages += FOR_WORKERS
        run_dir = nearest_folder(str(Path.cwd() if config.run_dir is None else config.run_dir.absolute()))
        model = Path(config.model.path).expanduser()
        folders = [str(folder.absolute()) for folder in (model, run_dir) if folder.exists()]
    with joined_for(config) as ray, contextlib.ExitStack() as stack:
        nodes = alive_nodes()
        check_room(config, nodes)
        url = None
        if config.rollout.runner == "ray":  # the nodes must reach where the gateway will listen
            host = own_address() if is_loopback(config.gateway.host) else config.gateway.host
            listener = stack.enter_context(bind(host, config.gateway.port))
            url = url_elsewhere(url_of(listener, host), host)
        answers = _ask(ray, nodes, (packages, folders, url), config.ray.start_timeout_s)
    here = answered(packages)
    for node in nodes:
        check_node(node.address, answers[node.id], here)
    return plan(config, nodes, answers)


def _ask(
    ray: ModuleType, nodes: Sequence[ClusterNode], question: tuple[object, ...], timeout_s: float
) -> dict[str, Answer]:
    ask = ray.remote(num_cpus=0, max_retries=0)(answered)
    asked = {node.id: ask.options(**on_node(node)).remote(*question) for node in nodes}
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    answers: dict[str, Answer] = {}
    for node in nodes:
        if asked[node.id] not in ready:
            raise ConfigError(
                f"node {node.address} has not answered within ray.start_timeout_s={timeout_s:g}: see `ray status` and "
                "the logs in its Ray folder; it may be overloaded, or unable to create the program's environment"
            )
        try:
            answers[node.id] = ray.get(asked[node.id])
        except ray.exceptions.RayError as error:
            reason = str(error).strip().rpartition("\n")[2]
            raise ConfigError(
                f"node {node.address} cannot run rllm ({reason}): install the packages of this machine in the "
                "environment that its `ray start` ran in"
            ) from error
    return answers


def check_room(config: TrainConfig, nodes: Sequence[ClusterNode]) -> None:
    """Raise `ConfigError` unless enough nodes have the resources of verl's workers, in use or not."""
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


def check_node(address: str, answer: Answer, here: Answer) -> None:
    """Raise `ConfigError` with the setting and the remedy if the facts about a node do not fit."""
    for name, expected in here.versions.items():
        found = answer.versions.get(name)
        if _matters(name, found) != _matters(name, expected):
            what = f"pip install '{name}=={expected}'" if name != "python" else f"use Python {expected}"
            raise ConfigError(
                f"node {address} has {name} {found or 'not installed'}, and this machine has {expected}: {what} in the "
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


def plan(config: TrainConfig, nodes: Sequence[ClusterNode], answers: Mapping[str, Answer]) -> list[str]:
    """Describe the nodes and what runs on each."""
    lines = [f"Ray cluster of {counted(len(nodes), 'node')}:"]
    for node in nodes:
        answer = answers[node.id]
        units = f"{counted(int(node.num_cpus), 'CPU')}, {counted(int(node.num_gpus), 'GPU')}"
        kind = f" ({answer.gpus[0]})" if answer.gpus else ""
        installed = " ".join(f"{name} {found}" for name, found in answer.versions.items())
        lines.append(f"  {node.address}: {units}{kind}; {installed}")
    if config.backend == "verl":
        unit = "CPU" if on_cpu(config) else "GPU"
        is_one = config.verl.num_nodes * config.verl.workers_per_node == 1
        lines.append(
            f"training: {counted(config.verl.num_nodes, 'node')} x {counted(config.verl.workers_per_node, 'worker')}, "
            + (f"on a {unit}, holds the model" if is_one else f"a {unit} each, hold the model in pieces")
        )
    where = "a vLLM server" if config.model.engine == "vllm" else "the process of the trainer"
    processes, at_a_time = "in the process of the trainer", f"{config.rollout.max_concurrent}"
    if config.rollout.runner == "ray":
        number = config.ray.num_actors or len([node for node in nodes if node.num_cpus]) or len(nodes)
        processes = f"{counted(number, 'process', 'processes')} on the nodes"
        at_a_time = counted(config.rollout.max_concurrent, "rollout")
    return [
        *lines,
        f"sampling: {where}, on this machine",
        f"rollouts: {processes}, {at_a_time} under way at a time",
    ]


def _matters(name: str, found: str | None) -> str | None:
    """Return the part of a version that must be equal: of Python's, major and minor, since functions are pickled."""
    return found.rpartition(".")[0] if name == "python" and found is not None else found
