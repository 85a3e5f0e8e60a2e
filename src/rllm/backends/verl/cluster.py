"""Ray: the cluster that is joined or started, and whether it has what a run needs, before any of it is taken."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rllm.backends.verl.versions import SUPPORTED, check_version
from rllm.engine.ray_cluster import sigterm_kept
from rllm.errors import ConfigError, counted, first_line

logger = logging.getLogger(__name__)

FREE_S = 60.0
"""How long to wait for resources that a run which has just ended still holds."""
ASK_S = 300.0
"""How long a node may take to tell its versions: a new process, and a few imports."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run needs of a cluster."""

    num_nodes: int
    workers_per_node: int
    resource: str
    """What each worker has one of: GPU, or CPU."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    id: str
    name: str
    total: float
    """How many of the resource it has."""
    free: float


def lacking(demand: Demand, num_fit: int) -> str:
    """That fewer nodes have what is needed than are asked for, in words."""
    where = "a node" if demand.num_nodes == 1 else f"each of {demand.num_nodes} nodes"
    fit = {0: "no node has", 1: "1 node has"}.get(num_fit, f"{num_fit} nodes have")
    return (
        f"verl.num_nodes={demand.num_nodes} and verl.workers_per_node={demand.workers_per_node} need "
        f"{counted(demand.workers_per_node, demand.resource)} on {where}, and {fit} {'it' if demand.workers_per_node == 1 else 'them'}"
    )


class Cluster:
    """A connection to Ray. One that was there before is left as it was."""

    def __init__(self, address: str | None, demand: Demand, environment: Mapping[str, str]) -> None:
        """
        Args:
            address: of a cluster, `auto`, or `None`: the one that RAY_ADDRESS names, else one on this machine alone.
            demand: what is needed of it.
            environment: variables of all processes that Ray starts for us.

        Raises:
            ConfigError: if there is no such cluster, or if it has not enough.
        """
        import ray

        self._demand = demand
        self._ours = not ray.is_initialized()
        if self._ours:
            self._join(address or os.environ.get("RAY_ADDRESS"), dict(environment))
        elif address not in (None, "auto", "local") and _full(address) != ray.get_runtime_context().gcs_address:
            raise ConfigError(
                f"verl.ray_address={address!r}: this program is connected to {ray.get_runtime_context().gcs_address} already: "
                "leave it out, or call ray.shutdown() first"
            )
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _join(self, address: str | None, environment: dict[str, str]) -> None:
        import ray

        demand = self._demand
        here = {}
        if address in (None, "local"):
            address = "local"
            if demand.resource == "CPU":
                here = {"num_cpus": max(demand.workers_per_node, os.cpu_count() or 1)}
        try:
            with sigterm_kept():
                ray.init(
                    address=address,
                    runtime_env={"env_vars": environment},
                    include_dashboard=False if address == "local" else None,
                    log_to_driver=bool(os.environ.get("RLLM_RAY_LOGS")),
                    logging_level=logging.WARNING,
                    **here,
                )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(
                f"verl.ray_address={address!r}: no Ray cluster can be joined there ({first_line(error)}): start one with "
                "`ray start --head` and name its address, or leave verl.ray_address and RAY_ADDRESS out for one on this "
                "machine alone"
            ) from error

    def _check(self) -> None:
        """Whether enough nodes have enough, free."""
        deadline = time.monotonic() + FREE_S
        while len(fit := self._fitting()) < self._demand.num_nodes:
            if time.monotonic() > deadline or not self._might_fit():
                raise ConfigError(self._shortage(len(fit)))
            time.sleep(0.5)
        self.nodes = fit

    def _fitting(self) -> list[Node]:
        return [node for node in nodes_of(self._demand.resource) if node.free >= self._demand.workers_per_node]

    def _might_fit(self) -> bool:
        """Whether it would do if nobody else used the cluster."""
        able = [node for node in nodes_of(self._demand.resource) if node.total >= self._demand.workers_per_node]
        return len(able) >= self._demand.num_nodes

    def _shortage(self, num_fit: int) -> str:
        demand = self._demand
        found = "; ".join(
            f"{node.name} has {counted(int(node.total), demand.resource)}, {int(node.free)} of them free"
            for node in nodes_of(demand.resource)
        )
        remedy = "lower verl.workers_per_node or verl.num_nodes, or add nodes"
        if demand.resource == "GPU":
            remedy += "; model.device=cpu trains without GPUs"
        return f"{lacking(demand, num_fit)} ({found or 'no node is alive'}): {remedy}"

    def check_nodes(self, model: str, run_dir: Path | None) -> None:
        """Ask the nodes that have room what they have installed, and whether they see the model and the run's folder.

        Raises:
            ConfigError: naming the node, what it lacks, and the remedy.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        paths = [Path(path).expanduser().absolute() for path in (model, run_dir) if path is not None]
        folders = [str(path) for path in paths if path.exists()]
        inspect = ray.remote(num_cpus=0, max_retries=0)(inspected)
        asked = {
            node.name: inspect.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            ).remote(folders)
            for node in self.nodes
        }
        for name, answer in asked.items():
            try:
                found = ray.get(answer, timeout=ASK_S)
            except ray.exceptions.GetTimeoutError as error:
                raise ConfigError(
                    f"node {name} has not answered within {ASK_S:g} s: see `ray status` and the logs in its Ray folder; a node that "
                    "is overloaded looks like that"
                ) from error
            except Exception as error:  # whatever Ray raises: the node cannot run our code
                raise ConfigError(
                    f"node {name} cannot be used ({first_line(error)}): install there what is installed here, with "
                    "pip install 'rllm[verl]' in the environment that its `ray start` ran in"
                ) from error
            check_node(name, found)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends. Repeatable."""
        import ray

        if self._ours and ray.is_initialized():
            ray.shutdown()


def _full(address: str) -> str:
    """An address as Ray itself writes it: `localhost:6379` with this machine's address in its network."""
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address(address))


def nodes_of(resource: str) -> list[Node]:
    """The nodes that are alive, and how much of a resource each has."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(
            id=node["NodeID"],
            name=node["NodeManagerAddress"],
            total=node["Resources"].get(resource, 0.0),
            free=free.get(node["NodeID"], {}).get(resource, 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def inspected(folders: Sequence[str]) -> dict[str, Any]:
    """Runs on a node: its versions, and which of the folders it does not see."""
    return {
        "versions": {package: version(package) for package in SUPPORTED},
        "missing": [folder for folder in folders if not Path(folder).exists()],
    }


def check_node(name: str, found: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: if what a node told of itself (`inspected`) will not do.
    """
    for package, installed in found["versions"].items():
        check_version(package, installed, f"on node {name}")
        if installed != version(package):
            raise ConfigError(
                f"node {name} has {package} {installed}, and here it is {version(package)}: install the same version on all "
                "nodes"
            )
    for folder in found["missing"]:
        raise ConfigError(
            f"node {name} does not see {folder!r}: put it on a file system that all nodes share, or at the same path on each"
        )
