"""Ray, imported only where it is asked for: a cluster is joined or started, and left as it was found."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rllm.errors import ConfigError, MissingDependencyError, first_line

REACH_S = 5.0
"""How long the address of a cluster may take to answer."""
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""What Ray sets in a program that was started with `ray job submit`, whose working directory it has shipped already."""
NOT_SHIPPED = [".git", ".venv", "venv", "__pycache__", "runs", "*.safetensors", "*.db", "*.db-wal"]
"""What of a working directory stays here, beside all that its .gitignore and .rayignore name."""


def load_ray(purpose: str = "rollout.runner=ray") -> Any:
    """The package.

    Raises:
        MissingDependencyError: if it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise  # it is there, and broken
        raise MissingDependencyError.of("ray", "ray", purpose) from error
    return ray


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A machine of the cluster that is alive."""

    id: str
    address: str
    num_cpus: float
    num_gpus: float


def alive_nodes() -> list[ClusterNode]:
    """The cluster's machines, by address."""
    ray = load_ray()
    found = [
        ClusterNode(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_cpus=node["Resources"].get("CPU", 0.0),
            num_gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.address, node.id))


def on_node(node: ClusterNode, **options: Any) -> dict[str, Any]:
    """Ray's options for what is to run on this machine and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    return {"scheduling_strategy": strategy, **options}


def own_address() -> str:
    """How the other machines of the cluster reach this one."""
    return str(load_ray().util.get_node_ip_address())


def url_elsewhere(url: str, host: str) -> str:
    """A URL of this machine as the others reach it: by Ray's name for it, where `host`, that is listened on, is all of its addresses."""
    if host not in ("", "0.0.0.0", "::"):
        return url
    name, parts = own_address(), urlsplit(url)
    return parts._replace(netloc=f"{f'[{name}]' if ':' in name else name}:{parts.port}").geturl()


def known_address(address: str | None) -> str | None:
    """The cluster that a setting or RAY_ADDRESS names; `None` for one on this machine alone."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


@contextmanager
def joined(
    address: str | None,
    *,
    working_dir: Path | None = None,
    not_shipped: Sequence[str] = (),
    num_cpus: int | None = None,
) -> Iterator[Any]:
    """Ray, connected while inside. A connection that the program has made itself is used, and stays.

    Args:
        address: of a cluster, or `auto`; by default that of RAY_ADDRESS, else one is started on this machine, and ends with us.
        working_dir: what processes on other machines find as their current directory; by default this one's.
        not_shipped: more patterns of what stays here.
        num_cpus: of a cluster that is started; by default those that there are.

    Raises:
        ConfigError: if no cluster answers there.
        MissingDependencyError: if Ray is not installed.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        return
    known = known_address(address)
    check_address(address)
    options: dict[str, Any] = {"address": known or "local"}
    if known is None:
        options |= {"include_dashboard": False, "num_cpus": num_cpus}
    elif SUBMITTED not in os.environ:
        shipped = working_dir or Path.cwd()
        options["runtime_env"] = {"working_dir": str(shipped), "excludes": [*NOT_SHIPPED, *not_shipped]}
    try:
        with sigterm_kept():
            ray.init(log_to_driver=bool(os.environ.get("RLLM_RAY_LOGS")), logging_level=logging.WARNING, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(_refusal(address, error)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """A program that joins a cluster inside hears SIGTERM as it did before. Ray takes it for itself, and ends the program at
    once, before the last step of a training is saved."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _refusal(address: str | None, error: Exception) -> str:
    told = first_line(error)
    if "exceeds" in told or "package size" in told.lower():
        return (
            f"ray.working_dir: what is sent to the nodes is too large ({told}): name a smaller folder, or list what the "
            "agent does not need in its .rayignore"
        )
    return (
        f"ray.address={address!r}: no Ray cluster can be joined there ({told}): start one with `ray start --head` and name its "
        "address, or leave ray.address and RAY_ADDRESS out for one on this machine alone"
    )


def check_address(address: str | None, *, key: str = "ray.address") -> None:
    """See whether anybody answers at the address of a cluster, if `key`, or else RAY_ADDRESS, gives one.

    Raises:
        ConfigError: if nobody does.
    """
    key = key if address else "RAY_ADDRESS"
    known = known_address(address)
    if known in (None, "auto"):
        return
    assert known is not None
    if known.startswith("ray://"):
        raise ConfigError(
            f"{key}={known!r}: the trainer and the processes on the nodes must reach each other, so it has to run on a machine of "
            "the cluster: start the program there, or with `ray job submit`, and leave the address out"
        )
    host, _, port = known.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{key}={known!r}: use host:port, such as 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise ConfigError(
            f"{key}={known!r}: nothing answers there ({error}): start a cluster with `ray start --head`, or leave it out for one "
            "on this machine alone"
        ) from error
