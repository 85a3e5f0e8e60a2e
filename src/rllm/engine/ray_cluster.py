"""Ray, imported only on demand: join or start a cluster, and send code and data to its machines."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rllm.errors import ConfigError, MissingDependencyError, first_line
from rllm.types import JSONObject

REACH_S = 5.0
"""Seconds that a cluster's address may take to answer."""
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable set by `ray job submit`, which has shipped the working directory already."""
NOT_SHIPPED = [".git", ".venv", "venv", "__pycache__", "runs", "*.safetensors", "*.db", "*.db-wal"]
"""Patterns of files that are not sent, in addition to .gitignore and .rayignore."""


def load_ray() -> Any:
    """Return the `ray` package; raise `MissingDependencyError` if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise  # installed, but broken
        raise MissingDependencyError.of("ray", "ray", "rollout.runner=ray") from error
    return ray


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A live machine of the cluster."""

    id: str
    address: str
    num_cpus: float
    num_gpus: float


def alive_nodes() -> list[ClusterNode]:
    """Return the machines of the cluster, sorted by address."""
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


def on_node(node: ClusterNode, **options: object) -> JSONObject:
    """Return Ray options that pin an actor to this machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    return {"scheduling_strategy": strategy, **options}


def own_address() -> str:
    """Return the address under which other machines of the cluster reach this one."""
    return str(load_ray().util.get_node_ip_address())


def url_elsewhere(url: str, host: str) -> str:
    """Return a URL of this machine as others reach it, replacing `host` if that means all interfaces."""
    if host not in ("", "0.0.0.0", "::"):
        return url
    name, parts = own_address(), urlsplit(url)
    return parts._replace(netloc=f"{f'[{name}]' if ':' in name else name}:{parts.port}").geturl()


def known_address(address: str | None) -> str | None:
    """Return the cluster named by a setting or RAY_ADDRESS; `None` for one on this machine alone."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


@contextmanager
def joined(
    address: str | None,
    *,
    ships: bool = True,
    working_dir: Path | None = None,
    not_shipped: Sequence[str] = (),
    num_cpus: int | None = None,
) -> Iterator[Any]:
    """Connect to Ray for the duration of the block; an existing connection of the program is used and kept.

    Args:
        address: address of a cluster, or `auto`; by default RAY_ADDRESS, or else a cluster is started on this machine
            and ended with the block.
        ships: send the working directory to processes on other machines.
        working_dir: current directory of processes on other machines; by default this one's.
        not_shipped: more patterns of files that are not sent.
        num_cpus: CPUs of a cluster that is started; by default the machine's.

    Raises:
        ConfigError: if no cluster answers, or the program is connected to another one.
        MissingDependencyError: if Ray is not installed.
    """
    ray = load_ray()
    if ray.is_initialized():
        _check_same(address)
        yield ray
        return
    known = known_address(address)
    check_address(address)
    options: JSONObject = {"address": known or "local"}
    if known is None:
        options |= {"include_dashboard": False, "num_cpus": num_cpus}
    elif ships and SUBMITTED not in os.environ:
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


def _check_same(address: str | None) -> None:
    """Raise `ConfigError` for the address of another cluster than the one that the program is connected to."""
    from ray._private.services import canonicalize_bootstrap_address  # `localhost` becomes this machine's address

    connected = load_ray().get_runtime_context().gcs_address
    if address in (None, "auto", "local"):
        return
    if canonicalize_bootstrap_address(_resolved(address)) != connected:
        raise ConfigError(
            f"ray.address={address!r}: this program is connected to {connected} already: leave it out, or call "
            "ray.shutdown() first"
        )


def _resolved(address: str) -> str:
    """Return an address with the IP address of its host, if the name is known."""
    host, _, port = address.rpartition(":")
    try:
        number = socket.gethostbyname(host)
    except OSError:
        return address
    return f"{'127.0.0.1' if number.startswith('127.') else number}:{port}"


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the program's SIGTERM handler after it has joined a cluster in the block.

    Ray installs its own, which ends the program at once, before the last training step is saved.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _refusal(address: str | None, error: Exception) -> str:
    reason = first_line(error)
    if "exceeds" in reason or "package size" in reason.lower():
        return (
            f"ray.working_dir: what is sent to the nodes is too large ({reason}): name a smaller folder, or list what "
            "the agent does not need in its .rayignore"
        )
    return (
        f"ray.address={address!r}: no Ray cluster can be joined there ({reason}): start one with `ray start --head` "
        "and name its address, or leave ray.address and RAY_ADDRESS out for one on this machine alone"
    )


def check_address(address: str | None) -> None:
    """Raise `ConfigError` if nothing answers at a cluster's address, from `ray.address` or else RAY_ADDRESS."""
    key = "ray.address" if address else "RAY_ADDRESS"
    known = known_address(address)
    if known in (None, "auto"):
        return
    assert known is not None
    if known.startswith("ray://"):
        raise ConfigError(
            f"{key}={known!r}: the trainer and the processes on the nodes must reach each other, so the trainer must "
            "run on a machine of the cluster: start the program there, or with `ray job submit`, and leave out the "
            "address"
        )
    host, _, port = known.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{key}={known!r}: use host:port, such as 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise ConfigError(
            f"{key}={known!r}: no Ray cluster answers at this address ({error}): start one with `ray start "
            "--head`, or leave it out for one on this machine alone"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ImportPaths:
    """Import paths of a program, in a form that works in a copy of its working directory on another machine."""

    inside: list[str]
    """Folders inside the working directory, relative to it."""
    outside: list[str]
    """Other folders, expected at the same absolute path."""

    @classmethod
    def of(cls, working_dir: Path | None = None) -> ImportPaths:
        """Return the import paths of this process."""
        root = (working_dir or Path.cwd()).resolve()
        folders = [Path(path or ".").resolve() for path in sys.path]
        inside = [str(folder.relative_to(root)) for folder in folders if folder.is_relative_to(root)]
        return cls(inside=inside, outside=[str(folder) for folder in folders if not folder.is_relative_to(root)])

    def apply(self) -> None:
        """Add them to the paths of this process, whose current directory is the copy."""
        here = Path.cwd()
        inside = [str((here / folder).resolve()) for folder in self.inside]
        outside = [folder for folder in self.outside if Path(folder).exists()]
        sys.path[:0] = [folder for folder in inside if folder not in sys.path]
        sys.path.extend(folder for folder in outside if folder not in sys.path)


OF_CODE = (
    "move it to a module of its own (agent.py) and import it from there, or make its clients, locks and open files "
    "inside the function"
)
OF_DATA = "use plain data: texts, numbers, lists, mappings, dataclasses; no clients, locks or open files"


def packed(value: object, what: str, remedy: str) -> bytes:
    """Return a value as bytes; raise a `ConfigError` that names the part if it cannot be pickled."""
    try:
        return _dumps(value)
    except Exception as error:  # pickling runs users' code
        held = next(_unsendable(value), None)
        named = f": it uses {held}" if held else ""
        raise ConfigError(
            f"{what} cannot be sent to another machine{named} ({type(error).__name__}: {error}): {remedy}"
        ) from error


def unpacked(data: bytes) -> Any:
    """Return the value of `packed` bytes."""
    from ray import cloudpickle

    return cloudpickle.loads(data)


def _dumps(value: object) -> bytes:
    from ray import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


def _unsendable(value: object) -> Iterator[str]:
    """Yield the names of values that functions in `value` use and that cannot be pickled."""
    for function in _functions_of(value):
        used = inspect.getclosurevars(function)
        for name, part in {**used.globals, **used.nonlocals}.items():
            try:
                _dumps(part)
            except Exception:  # see `packed`
                yield f"{name!r} ({type(part).__name__})"


def _functions_of(value: object) -> Iterator[Any]:
    """Yield a function, or the methods of a class or of attributes' classes."""
    is_code = inspect.isfunction(value) or inspect.isclass(value)
    for part in [value] if is_code else list(getattr(value, "__dict__", {}).values()):
        held = vars(part).values() if inspect.isclass(part) else [part]
        yield from (item for item in held if inspect.isfunction(item))
