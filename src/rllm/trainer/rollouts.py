"""Where the rollouts of a run are made: in this process, or in processes on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rllm._runtime.network import is_loopback
from rllm.config.schema import RolloutConfig, TrainConfig, refuse_changes
from rllm.engine.capture import GatewayEngine, RemoteGateway
from rllm.engine.ray_actors import Spread
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
from rllm.engine.ray_runner import RayRolloutRunner
from rllm.engine.recording_engine import RecordingEngine
from rllm.engine.runner import RolloutRunner
from rllm.errors import ConfigError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.sdk.propagation import environment
from rllm.sdk.variables import run_key
from rllm.store.base import TraceStore
from rllm.trainer.doors import Door, RunningRollout, Surroundings


@dataclass(frozen=True, kw_only=True)
class RemoteSurroundings(Surroundings):
    """What a run offers to rollouts on another machine."""

    @property
    def recorded(self) -> RecordingEngine:
        assert isinstance(self.inference, GatewayEngine)
        return self.inference


def open_elsewhere(door: Door, gateway: RemoteGateway, rollout: RolloutConfig) -> RunningRollout:
    """The rollouts of a door in a process that knows the policy by its gateway only."""
    store = cast("TraceStore", gateway)  # rollouts only read sessions of it
    return door.open(
        RemoteSurroundings(inference=GatewayEngine(gateway), gateway=gateway, store=store, rollout=rollout)
    )


def check_rollouts(config: TrainConfig, door: Door) -> None:
    """What can be said before anything is started; `ray.address` becomes that of verl's workers, too.

    Raises:
        ConfigError: naming a setting that would have no effect, an address where nobody is, or what cannot be sent.
        MissingDependencyError: if Ray is needed and not installed.
    """
    if config.backend == "verl":
        _join_workers(config)
    if config.rollout.runner == "ray":
        _check_sendable(config, door)
    else:
        serves_verl = ("address", "start_timeout_s") if config.backend == "verl" else ()
        names = [name for name in type(config.ray).model_fields if name not in serves_verl]
        refuse_changes(config.ray, "ray", names, "without processes on Ray; set rollout.runner=ray, or leave it out")


def _join_workers(config: TrainConfig) -> None:
    """Let verl's workers have the run's cluster, if they are told of no other."""
    if config.verl.ray_address is None and config.ray.address is not None:
        check_address(config.ray.address)
        config.verl.ray_address = config.ray.address
    if config.ray.address not in (None, config.verl.ray_address):
        raise ConfigError(
            f"verl.ray_address={config.verl.ray_address!r} and ray.address={config.ray.address!r} are two clusters: set ray.address "
            "only"
        )


def _check_sendable(config: TrainConfig, door: Door) -> None:
    if door.demonstrates:
        raise ConfigError("rollout.runner='ray' would have no effect: demonstrations are read, not made; leave it out")
    folder = config.ray.working_dir
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"ray.working_dir={str(folder)!r}: there is no such folder")
    load_ray()
    check_address(address_of(config))
    packed(door, "the agent", OF_CODE)


def address_of(config: TrainConfig) -> str | None:
    """The cluster that the settings name, if they name one."""
    return config.ray.address or (config.verl.ray_address if config.backend == "verl" else None)


def uses_ray(config: TrainConfig) -> bool:
    """Whether anything of the run is on Ray."""
    return config.rollout.runner == "ray" or config.backend == "verl"


def uses_a_cluster(config: TrainConfig) -> bool:
    """Whether anything of the run is on a cluster that is there already."""
    return uses_ray(config) and known_address(address_of(config)) is not None


def on_ray(config: TrainConfig) -> AbstractContextManager[Any]:
    """The connection to Ray for as long as the run takes, if its rollouts need one; verl's workers then use it, too."""
    return joined_for(config) if config.rollout.runner == "ray" else nullcontext()


def joined_for(config: TrainConfig) -> AbstractContextManager[Any]:
    """The connection that a run makes."""
    cpus = max(os.cpu_count() or 1, config.verl.workers_per_node) if config.backend == "verl" else None
    return joined(
        address_of(config), working_dir=config.ray.working_dir, not_shipped=_not_shipped(config), num_cpus=cpus
    )


def _not_shipped(config: TrainConfig) -> list[str]:
    """The run's own folder, if it lies in what is sent."""
    root = (config.ray.working_dir or Path.cwd()).resolve()
    folder = config.run_dir.resolve() if config.run_dir is not None else None
    return [str(folder.relative_to(root))] if folder is not None and folder.is_relative_to(root) else []


def gateway_config(config: TrainConfig) -> GatewayConfig:
    """Return how the run's gateway listens: on this machine, or where the nodes of Ray reach it."""
    settings = config.gateway
    elsewhere = config.rollout.runner == "ray" and is_loopback(settings.host)
    return GatewayConfig.of_run(
        run_key(),
        host=own_address() if elsewhere else settings.host,
        port=settings.port,
        exact_turns=settings.exact_turns,
        otel=settings.otel,
        shutdown_timeout_s=1.0,
    )


@contextmanager
def running(config: TrainConfig, door: Door, around: Surroundings, gateway: GatewayServer) -> Iterator[RolloutRunner]:
    """The runner of a run, at work.

    Raises:
        ConfigError: if a part does not fit, or a node cannot make rollouts.
    """
    rollout, most = config.rollout, door.most_at_a_time
    settings: dict[str, Any] = {
        "max_concurrent": rollout.max_concurrent,
        "timeout_s": rollout.timeout_s,
        "num_retries": rollout.num_retries,
        "retry_if": door.retry_if,
    }
    if rollout.runner == "local":
        settings["max_concurrent"] = most or rollout.max_concurrent
        with door.open(around) as engine:
            yield RolloutRunner(engine, **settings)
        return
    remote, spread = remote_gateway(gateway), spread_of(config)
    with RayRolloutRunner(
        partial(open_elsewhere, door, remote, rollout),
        spread=spread if most is None else replace(spread, concurrency=most),
        gateway=remote,
        environment=environment(remote.url, api_key=remote.process_key),
        paths=ImportPaths.of(config.ray.working_dir),
        **settings,
    ) as runner:
        yield runner


def spread_of(config: TrainConfig) -> Spread:
    """How the rollouts of a run are spread over the nodes."""
    settings = config.ray
    return Spread(
        num_actors=settings.num_actors,
        concurrency=settings.concurrency,
        cpus_per_actor=settings.cpus_per_actor,
        start_timeout_s=settings.start_timeout_s,
    )


def remote_gateway(gateway: GatewayServer) -> RemoteGateway:
    """The gateway as other machines reach it, which is by Ray's name for this one where it listens on all addresses."""
    key = gateway.config.api_key
    assert key is not None, "a gateway for other machines has a key"
    return RemoteGateway(url=url_elsewhere(gateway.url, gateway.config.host), api_key=key)
