"""Ray cluster of a run: join or start it, and wait for its resources; the supported versions of verl and Ray."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rllm.engine.ray_cluster import sigterm_kept
from rllm.errors import ConfigError, MissingDependencyError, counted, first_line

logger = logging.getLogger(__name__)

SUPPORTED: dict[str, tuple[str, str]] = {"verl": ("0.9.0", "0.10"), "ray": ("2.50", "3")}
"""Versions from the first up to, but without, the second."""
TESTED = "verl 0.9.0 and 0.9.1 with Ray 2.60"

FREE_S = 60.0
"""Seconds to wait for resources that a run which has just ended still holds."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Resources that a run needs of a cluster."""

    num_nodes: int
    workers_per_node: int
    resource: str
    """Resource that each worker has one of: GPU, or CPU."""


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

        self._ours = not ray.is_initialized()
        if self._ours:
            self._join(address or os.environ.get("RAY_ADDRESS"), demand, dict(environment))
        elif address not in (None, "auto", "local") and _full(address) != ray.get_runtime_context().gcs_address:
            raise ConfigError(
                f"ray.address={address!r}: this program is connected to {ray.get_runtime_context().gcs_address} "
                "already: leave it out, or call ray.shutdown() first"
            )
        try:
            _wait_for_room(demand)
        except BaseException:
            self.close()
            raise

    def _join(self, address: str | None, demand: Demand, environment: dict[str, str]) -> None:
        import ray

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

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here. Repeatable."""
        import ray

        if self._ours and ray.is_initialized():
            ray.shutdown()


def _full(address: str) -> str:
    """Return an address as Ray writes it, with this machine's network address in place of `localhost`."""
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address(address))


def _wait_for_room(demand: Demand) -> None:
    """Wait until enough nodes have enough free resources, as long as the cluster is large enough.

    Raises:
        ConfigError: listing what each node has.
    """
    deadline = time.monotonic() + FREE_S
    while True:
        nodes = _nodes_with(demand.resource)
        num_fit = sum(free >= demand.workers_per_node for _, _, free in nodes)
        if num_fit >= demand.num_nodes:
            return
        num_large = sum(total >= demand.workers_per_node for _, total, _ in nodes)
        if num_large < demand.num_nodes or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    found = "; ".join(
        f"{name} has {counted(int(total), demand.resource)}, {int(free)} of them free" for name, total, free in nodes
    )
    remedy = "lower verl.workers_per_node or verl.num_nodes, or add nodes"
    if demand.resource == "GPU":
        remedy += "; model.device=cpu trains without GPUs"
    raise ConfigError(f"{shortage(demand, num_fit)} ({found or 'no node is alive'}): {remedy}")


def _nodes_with(resource: str) -> list[tuple[str, float, float]]:
    """Return the address of each node that is alive, with the amount of a resource that it has, and has free."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        (
            node["NodeManagerAddress"],
            node["Resources"].get(resource, 0.0),
            free.get(node["NodeID"], {}).get(resource, 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_versions() -> None:
    """Check the installed versions of verl and Ray.

    Raises:
        MissingDependencyError: if verl or Ray is not installed.
        ConfigError: if one of them is too old or too new.
    """
    for package in SUPPORTED:
        try:
            check_version(package, version(package))
        except PackageNotFoundError as error:
            raise MissingDependencyError.of(package, "verl", "backend=verl") from error


def check_version(package: str, installed: str) -> None:
    """Raise `ConfigError` if a version is not supported."""
    low, high = SUPPORTED[package]
    if not _numbers(low) <= _numbers(installed) < _numbers(high):
        raise ConfigError(
            f"backend=verl: {package} {installed} is installed, and this version of rllm works with {package} "
            f">={low},<{high} (tested: {TESTED}): pip install '{package}>={low},<{high}'"
        )


def is_before(package: str, first: str) -> bool:
    """Return whether the installed version is older than this one."""
    return _numbers(version(package)) < _numbers(first)


def _numbers(text: str) -> tuple[int, ...]:
    """Return a release as numbers; a suffix, as in 0.10.0.dev1, is ignored."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)
