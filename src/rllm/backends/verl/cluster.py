"""Ray cluster of a run: join or start it, and check its resources and versions before any of it is used."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

from rllm.engine.ray_cluster import sigterm_kept
from rllm.errors import ConfigError, MissingDependencyError, counted, first_line

logger = logging.getLogger(__name__)

SUPPORTED: dict[str, tuple[str, str]] = {"verl": ("0.9.0", "0.10"), "ray": ("2.50", "3")}
"""Versions from the first up to, but without, the second."""
TESTED = "verl 0.9.0 and 0.9.1 with Ray 2.60"

FREE_S = 60.0
"""Seconds to wait for resources that a run which has just ended still holds."""
ASK_S = 300.0
"""Seconds a node may take to report its versions: a new process, and a few imports."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Resources that a run needs of a cluster."""

    num_nodes: int
    workers_per_node: int
    resource: str
    """Resource that each worker has one of: GPU, or CPU."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """Machine of the cluster."""

    id: str
    name: str
    total: float
    """Amount of the resource that it has."""
    free: float


def shortage(demand: Demand, num_fit: int) -> str:
    """Return in words that too few nodes have what is needed."""
    where = "a node" if demand.num_nodes == 1 else f"each of {demand.num_nodes} nodes"
    fit = {0: "no node has", 1: "1 node has"}.get(num_fit, f"{num_fit} nodes have")
    return (
        f"verl.num_nodes={demand.num_nodes} and verl.workers_per_node={demand.workers_per_node} need "
        f"{counted(demand.workers_per_node, demand.resource)} on {where}, and {fit} "
        f"{'it' if demand.workers_per_node == 1 else 'them'}"
    )


class Cluster:
    """Connection to Ray; a cluster that was running before keeps running."""

    def __init__(self, address: str | None, demand: Demand, environment: Mapping[str, str]) -> None:
        """Join or start the cluster and check that it has enough resources.

        Args:
            address: a cluster, `auto`, or `None` for the one that RAY_ADDRESS names, else one on this machine alone.
            demand: resources that are needed.
            environment: variables of all processes that Ray starts for the run.

        Raises:
            ConfigError: if there is no such cluster, or if it has too little.
        """
        import ray

        self._demand = demand
        self._ours = not ray.is_initialized()
        if self._ours:
            self._join(address or os.environ.get("RAY_ADDRESS"), dict(environment))
        elif address not in (None, "auto", "local") and _full(address) != ray.get_runtime_context().gcs_address:
            raise ConfigError(
                f"ray.address={address!r}: this program is connected to {ray.get_runtime_context().gcs_address} "
                "already: leave it out, or call ray.shutdown() first"
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
                f"ray.address={address!r}: no Ray cluster can be joined there ({first_line(error)}): start one "
                "with `ray start --head` and name its address, or leave ray.address and RAY_ADDRESS out for one "
                "on this machine alone"
            ) from error

    def _check(self) -> None:
        """Wait for enough free resources, if the cluster could have them."""
        deadline = time.monotonic() + FREE_S
        while len(fit := self._fitting()) < self._demand.num_nodes:
            if time.monotonic() > deadline or not self._might_fit():
                raise ConfigError(self._shortage(len(fit)))
            time.sleep(0.5)
        self.nodes = fit

    def _fitting(self) -> list[Node]:
        return [node for node in nodes_of(self._demand.resource) if node.free >= self._demand.workers_per_node]

    def _might_fit(self) -> bool:
        """Return whether the cluster is large enough if nothing else uses it."""
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
        return f"{shortage(demand, num_fit)} ({found or 'no node is alive'}): {remedy}"

    def check_nodes(self, model: str, run_dir: Path | None) -> None:
        """Check versions on the nodes with room, and that they see the model and the run's folder.

        Raises:
            ConfigError: naming the node, the problem, and the remedy.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        paths = [Path(path).expanduser().absolute() for path in (model, run_dir) if path is not None]
        folders = [str(path) for path in paths if path.exists()]
        inspect = ray.remote(num_cpus=0, max_retries=0)(inspect_node)
        pending = {
            node.name: inspect.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            ).remote(folders)
            for node in self.nodes
        }
        for name, answer in pending.items():
            try:
                found = ray.get(answer, timeout=ASK_S)
            except ray.exceptions.GetTimeoutError as error:
                raise ConfigError(
                    f"node {name} has not answered within {ASK_S:g} s: see `ray status` and the logs in its Ray "
                    "folder; it may be overloaded"
                ) from error
            except Exception as error:  # Ray raises many types: the node cannot run our code
                raise ConfigError(
                    f"node {name} cannot be used ({first_line(error)}): install there what is installed here, with "
                    "pip install 'rllm[verl]' in the environment that its `ray start` ran in"
                ) from error
            check_node(name, found)

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here. Repeatable."""
        import ray

        if self._ours and ray.is_initialized():
            ray.shutdown()


def _full(address: str) -> str:
    """Return an address as Ray writes it, with this machine's network address in place of `localhost`."""
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address(address))


def nodes_of(resource: str) -> list[Node]:
    """Return the nodes that are alive, with the amount of a resource that each has."""
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


class NodeReport(TypedDict):
    """Findings of `inspect_node`."""

    versions: dict[str, str]
    missing: list[str]


def inspect_node(folders: Sequence[str]) -> NodeReport:
    """Return, on a node, its versions and those of the folders that it does not see."""
    return {
        "versions": {package: version(package) for package in SUPPORTED},
        "missing": [folder for folder in folders if not Path(folder).exists()],
    }


def check_node(name: str, found: NodeReport) -> None:
    """Check a node's report.

    Raises:
        ConfigError: naming the node and the problem.
    """
    for package, installed in found["versions"].items():
        check_version(package, installed, f"on node {name}")
        if installed != version(package):
            raise ConfigError(
                f"node {name} has {package} {installed}, and this machine has {version(package)}: install the same "
                "version on all nodes"
            )
    for folder in found["missing"]:
        raise ConfigError(
            f"node {name} does not see {folder!r}: put it on a file system that all nodes share, or at the same path "
            "on each"
        )


def check_versions() -> None:
    """Check the installed versions of verl and Ray.

    Raises:
        MissingDependencyError: if verl or Ray is not installed.
        ConfigError: if one of them is too old or too new.
    """
    for package in SUPPORTED:
        if find_spec(package) is None:
            raise MissingDependencyError.of(package, "verl", "backend=verl")
        try:
            installed = version(package)
        except PackageNotFoundError as error:
            raise MissingDependencyError.of(package, "verl", "backend=verl") from error
        check_version(package, installed)


def check_version(package: str, installed: str, where: str = "here") -> None:
    """Check that a version is supported.

    Raises:
        ConfigError: if it is not, naming `where` it is installed.
    """
    low, high = SUPPORTED[package]
    if not _numbers(low) <= _numbers(installed) < _numbers(high):
        raise ConfigError(
            f"backend=verl: {package} {installed} is installed {where}, and this version of rllm works with {package} "
            f">={low},<{high} (tested: {TESTED}): pip install '{package}>={low},<{high}'"
        )


def is_before(package: str, first: str) -> bool:
    """Return whether the installed version is older than this one."""
    return _numbers(version(package)) < _numbers(first)


def _numbers(text: str) -> tuple[int, ...]:
    """Return a release as numbers; a suffix, as in 0.10.0.dev1, is ignored."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)
