"""Rollouts of a run: the requests of a step or an evaluation, and their runner, in this process or on a Ray cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from rllm.config.sampling import NEUTRAL, derived_seed
from rllm.config.schema import RolloutConfig, TrainConfig, refuse_changes
from rllm.data.dataset import Dataset
from rllm.engine.capture import GatewayEngine, RemoteGateway
from rllm.engine.ray_actors import RayRolloutRunner
from rllm.engine.ray_cluster import (
    OF_CODE,
    ImportPaths,
    check_address,
    joined,
    known_address,
    load_ray,
    own_address,
    packed,
    url_elsewhere,
)
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import Rollout, RolloutRunner
from rllm.engine.scoring import Scoring
from rllm.errors import ConfigError
from rllm.gateway.config import GatewayConfig, is_loopback
from rllm.gateway.server import GatewayServer
from rllm.sdk.propagation import environment
from rllm.sdk.variables import run_key
from rllm.store.base import TraceStore
from rllm.trainer.rollout_sources import RolloutContext, RolloutSource
from rllm.types import JSONMapping, JSONObject

if TYPE_CHECKING:
    from rllm.algorithms.base import Algorithm


def open_remote(
    source: RolloutSource, gateway: RemoteGateway, rollout: RolloutConfig
) -> AbstractContextManager[Rollout]:
    """Return the rollouts of a source in a process that reaches the policy only through its gateway."""
    store = cast("TraceStore", gateway)  # rollouts only read sessions of it
    return source.open(RolloutContext(inference=GatewayEngine(gateway), gateway=gateway, store=store, rollout=rollout))


def check_rollouts(config: TrainConfig, source: RolloutSource) -> None:
    """Check the settings of rollouts before anything is started.

    Raises:
        ConfigError: naming a setting without effect, an address without a server, or an object that cannot be sent.
        MissingDependencyError: if Ray is needed and not installed.
    """
    if config.rollout.runner != "ray":
        serves_verl = ("address", "start_timeout_s") if config.backend == "verl" else ()
        names = [name for name in type(config.ray).model_fields if name not in serves_verl]
        refuse_changes(config.ray, "ray", names, "without processes on Ray; set rollout.runner=ray, or leave it out")
        return
    if source.demonstrates:
        raise ConfigError("rollout.runner='ray' has no effect on demonstrations, which are not sampled: leave it out")
    folder = config.ray.working_dir
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"ray.working_dir={str(folder)!r}: no such folder")
    load_ray()
    check_address(config.ray.address)
    packed(source, "the agent", OF_CODE)


def uses_a_cluster(config: TrainConfig) -> bool:
    """Return whether any part of the run is on an existing cluster."""
    uses_ray = config.rollout.runner == "ray" or config.backend == "verl"
    return uses_ray and known_address(config.ray.address) is not None


def on_ray(config: TrainConfig) -> AbstractContextManager[object]:
    """Return the connection to Ray for the whole run, if rollouts need one; verl's workers share it."""
    return joined_for(config) if config.rollout.runner == "ray" else nullcontext()


def joined_for(config: TrainConfig) -> AbstractContextManager[ModuleType]:
    """Return the connection of a run to its cluster."""
    cpus = max(os.cpu_count() or 1, config.verl.workers_per_node) if config.backend == "verl" else None
    # The run's own folder is not shipped, if it lies in the folder that is.
    root = (config.ray.working_dir or Path.cwd()).resolve()
    folder = config.run_dir.resolve() if config.run_dir is not None else None
    own = [str(folder.relative_to(root))] if folder is not None and folder.is_relative_to(root) else []
    return joined(config.ray.address, working_dir=config.ray.working_dir, not_shipped=own, num_cpus=cpus)


def gateway_config(config: TrainConfig) -> GatewayConfig:
    """Return the settings of the run's gateway, which listens on this machine, or where the nodes of Ray reach it."""
    settings = config.gateway
    elsewhere = config.rollout.runner == "ray" and is_loopback(settings.host)
    return GatewayConfig.of_run(
        run_key(),
        host=own_address() if elsewhere else settings.host,
        port=settings.port,
        exact_turns=settings.exact_turns,
        otel=settings.otel,
        shutdown_timeout_s=1.0,  # a call under way at the end belongs to a cancelled rollout
    )


@contextmanager
def running(
    config: TrainConfig, source: RolloutSource, context: RolloutContext, gateway: GatewayServer, scoring: Scoring
) -> Iterator[RolloutRunner]:
    """Yield the running runner of a run; raise `ConfigError` if a part does not fit or a node cannot make rollouts."""
    rollout, most = config.rollout, source.max_parallel
    settings: JSONObject = {
        **{name: getattr(rollout, name) for name in ("max_concurrent", "timeout_s", "num_retries")},
        "retry_if": source.retry_if,
        "scoring": scoring,
    }
    if rollout.runner == "local":
        with source.open(context) as engine:
            yield RolloutRunner(engine, **{**settings, "max_concurrent": most or rollout.max_concurrent})
        return
    remote = remote_gateway(gateway)
    with RayRolloutRunner(
        partial(open_remote, source, remote, rollout),
        spread=config.ray if most is None else config.ray.model_copy(update={"concurrency": most}),
        gateway=remote,
        environment=environment(remote.url, api_key=remote.process_key),
        paths=ImportPaths.of(config.ray.working_dir),
        **settings,
    ) as runner:
        yield runner


def remote_gateway(gateway: GatewayServer) -> RemoteGateway:
    """Return the gateway as other machines reach it: by Ray's name of this machine if it listens on all addresses."""
    key = gateway.config.api_key
    assert key is not None, "a gateway for other machines has a key"
    return RemoteGateway(url=url_elsewhere(gateway.url, gateway.config.host), api_key=key)


def training_attempts(
    data: Dataset,
    rows: Sequence[int],
    config: TrainConfig,
    algorithm: Algorithm,
    *,
    step: int,
    extra_round: int = 0,
) -> list[RolloutRequest]:
    """Return `group_size` attempts at each task of a step, and one greedy attempt for algorithms that need it.

    `extra_round` is 0 for the step's own tasks, and counts from 1 for tasks that replace some of them.
    """
    rollout = config.rollout
    sampled = {"temperature": rollout.temperature, "max_tokens": rollout.max_tokens, **NEUTRAL}
    greedy = {**sampled, "temperature": 0.0}
    attempts = []
    for place, row in enumerate(rows):
        # A task that a step takes twice is two groups: its place in the step keeps them apart.
        task_id = f"{data.task_id(row)}@{step}.{extra_round}.{place}"
        attempt = partial(
            RolloutRequest,
            task=data[row],
            task_id=task_id,
            source=data.source_of(row),
            split="train",
            training_step=step,
        )
        seeded = partial(_seeded, seed=config.seed, split="train", task_id=task_id)
        for index in range(rollout.group_size):
            sampling = seeded(sampled, index=index)
            attempts.append(attempt(index=index, sampling=sampling, side_calls=rollout.side_calls))
        if algorithm.needs_greedy:
            sampling = seeded(greedy, index=rollout.group_size)
            attempts.append(attempt(index=rollout.group_size, sampling=sampling, trainable=False))
    return attempts


def eval_attempts(data: Dataset, config: TrainConfig, *, step: int) -> list[RolloutRequest]:
    """Return `eval.num_rollouts` attempts at each held-out task after `step` steps.

    All evaluations of a run use the same seeds, which reduces the noise of their differences.
    """
    judged = config.eval
    imposed = {"temperature": judged.temperature, "top_p": judged.top_p, "top_k": judged.top_k}
    sampling = {**imposed, "max_tokens": config.rollout.max_tokens}
    times: Counter[str] = Counter()  # rows that are the same task, as `Dataset.repeat` makes them, continue counting
    attempts = []
    for row in range(len(data)):
        task_id = data.task_id(row)
        for _ in range(judged.num_rollouts):
            index = times[task_id]
            times[task_id] += 1
            attempts.append(
                RolloutRequest(
                    task=data[row],
                    task_id=task_id,
                    source=data.source_of(row),
                    index=index,
                    split="eval",
                    training_step=step,
                    sampling=_seeded(sampling, config.seed, "eval", task_id, index),
                    trainable=False,
                )
            )
    return attempts


def _seeded(imposed: JSONMapping, seed: int, split: str, task_id: str, index: int) -> JSONObject:
    given = {name: value for name, value in imposed.items() if value is not None}
    return {**given, "seed": derived_seed(seed, split, task_id, index)}
