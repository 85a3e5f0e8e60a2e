"""Resources of a Ray cluster, verl's workers on them, and the supported versions of both projects."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rllm.engine.ray_cluster import alive_nodes
from rllm.errors import ConfigError, MissingDependencyError, RLLMError, WorkerError, counted
from rllm.types import JSONMapping

SUPPORTED = {"verl": ">=0.9.0,<0.10", "ray": ">=2.50,<3"}
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
    """Return a sentence on how many nodes have the resources, which is too few."""
    where = "a node" if demand.num_nodes == 1 else f"each of {demand.num_nodes} nodes"
    fit = {0: "no node has", 1: "1 node has"}.get(num_fit, f"{num_fit} nodes have")
    return (
        f"verl.num_nodes={demand.num_nodes} and verl.workers_per_node={demand.workers_per_node} need "
        f"{counted(demand.workers_per_node, demand.resource)} on {where}, and {fit} "
        f"{'it' if demand.workers_per_node == 1 else 'them'}"
    )


def wait_for_room(demand: Demand) -> None:
    """Wait until enough nodes have free resources; raise `ConfigError`, listing each node's, if that takes too long."""
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
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        (node.address, node.num_cpus if resource == "CPU" else node.num_gpus, free.get(node.id, {}).get(resource, 0.0))
        for node in alive_nodes()
    ]


def check_versions() -> None:
    """Raise `ConfigError` if verl or Ray is too old or too new, `MissingDependencyError` if it is not installed."""
    for package in SUPPORTED:
        try:
            check_version(package, version(package))
        except PackageNotFoundError as error:
            raise MissingDependencyError.of(package, "verl", "backend=verl") from error


def check_version(package: str, installed: str) -> None:
    """Raise `ConfigError` if a version is not supported."""
    supported = SUPPORTED[package]
    if not SpecifierSet(supported).contains(installed, prereleases=True):
        raise ConfigError(
            f"backend=verl: {package} {installed} is installed, and this version of rllm works with {package} "
            f"{supported} (tested: {TESTED}): pip install '{package}{supported}'"
        )


def is_before(package: str, first: str) -> bool:
    """Return whether the installed version is older than this one."""
    return Version(version(package)) < Version(first)


WORK = {
    "policy_outputs": "score a batch",
    "reference_outputs": "score a batch with the reference",
    "critic_outputs": "estimate the values of a batch",
    "update_policy": "update the policy",
    "update_critic": "update the critic",
    "next_weights": "gather the weights",
    "save": "write a checkpoint",
    "load": "read a checkpoint",
}
"""Description of each of the workers' methods, for messages."""
NOTICE_S = 30.0
"""Seconds that Ray may take to notice that a process is gone."""
_NODE = re.compile(r"\bip[=:]\s*([0-9a-fA-F.:]+[0-9a-fA-F])")
_OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "can't allocate memory")
_KILLED_FOR_MEMORY = ("running low on memory", "NODE_OUT_OF_MEMORY")
"""Texts in the errors of workers that ran out of memory, and of Ray when it killed them for it."""
_SMALLER = "lower optim.micro_batch_tokens, set model.gradient_checkpointing or optim.offload, or use more workers"


class WorkerGroup:
    """One process of verl's for each device, which together hold a sharded model."""

    def __init__(
        self,
        configs: JSONMapping,
        demand: Demand,
        *,
        device: str,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """Start the processes and load their models; raise `WorkerError` if one dies, or does not start in time."""
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        from rllm.backends.verl.worker import TrainingProcess

        on_gpus = demand.resource == "GPU"
        self._timeout_s = timeout_s
        self._pool = RayResourcePool(
            [demand.workers_per_node] * demand.num_nodes, use_gpu=on_gpus, max_colocate_count=1
        )
        self._group: Any = None
        made = RayClassWithInitArgs(ray.remote(TrainingProcess), configs=dict(configs), device=device)

        def start() -> None:
            self._group = RayWorkerGroup(
                self._pool, made, device_name=device, use_gpu=on_gpus, worker_env=dict(environment)
            )
            self._group.build()

        try:
            self._in_time("start the workers and load the model", start)
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of all workers and return their answer.

        Raises:
            WorkerError: if one of them raises, dies, or takes longer than `verl.timeout_s`.
        """
        return self._in_time(WORK.get(method, "get ready"), lambda: getattr(self._group, method)(*arguments))

    def num_shards(self, role: str) -> int:
        """Return a role's number of data-parallel parts; tensor or sequence parallelism makes it smaller."""
        ranks = self.ask("_query_dispatch_info", role)
        return int(max(ranks)) + 1

    def _in_time(self, what: str, work: Callable[[], object]) -> Any:
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # raised by result() below
                outcome.set_exception(error)

        threading.Thread(target=run, name=f"rllm verl: {what}", daemon=True).start()
        try:
            return outcome.result(self._timeout_s)
        except TimeoutError as error:
            raise WorkerError(
                f"verl's workers took more than {self._timeout_s:g} s to {what}: raise verl.timeout_s if they need "
                "longer; `ray stack` on their nodes shows what they wait for"
            ) from error
        except RLLMError:
            raise
        except Exception as error:
            raise WorkerError(_explained(what, self._death() or error)) from error

    def _death(self) -> Exception | None:
        """Return Ray's error for a worker that died; those that waited for it only report a lost peer."""
        import ray

        workers = [] if self._group is None else self._group.workers
        signs = [worker.__ray_ready__.remote() for worker in workers]
        done, _ = ray.wait(signs, num_returns=len(signs), timeout=NOTICE_S) if signs else ([], [])
        for sign in done:
            try:
                ray.get(sign)
            except ray.exceptions.RayActorError as error:
                death: Exception = error
                return death
        return None

    def close(self) -> None:
        """Stop the processes and release their devices. Repeatable."""
        import ray
        from ray.util import remove_placement_group

        if not ray.is_initialized():
            return
        for worker in [] if self._group is None else self._group.workers:
            ray.kill(worker)
        for group in self._pool.pgs or ():
            remove_placement_group(group)
        self._group, self._pool.pgs = None, None


def _explained(what: str, error: Exception) -> str:
    """Return the worker's failure in words, with the node and the remedy."""
    import ray.exceptions

    text = str(error)
    node = _NODE.search(text)
    where = f" on node {node.group(1)}" if node else ""
    is_dead = isinstance(error, ray.exceptions.RayActorError)
    if any(sign in text for sign in (_KILLED_FOR_MEMORY if is_dead else _OUT_OF_MEMORY)):
        return f"a verl worker{where} ran out of memory and could not {what}: {_SMALLER} ({_last_line(text)})"
    if is_dead:
        return (
            f"a verl worker{where} died and could not {what}: see its log in Ray's folder (worker-*.err), and "
            "resume from the last checkpoint; if the log gives no reason, the system may have killed it for its "
            f"memory: {_SMALLER} ({_last_line(text)})"
        )
    return f"a verl worker{where} could not {what}: {_last_line(text)}"


def _last_line(text: str) -> str:
    """Return the last line of a traceback that is not empty, which has the error."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1][:500] if lines else "no reason given"
