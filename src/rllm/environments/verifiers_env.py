"""`verifiers:NAME`: environments of the package verifiers, which make and score their own rollouts.

Their model calls go to the URL of the rollout's session at the gateway, which captures the tokens. Both interfaces
work: modules with `load_environment`, for verifiers below 0.4, and the tasksets of `verifiers.v1`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from rllm.data.dataset import Dataset
from rllm.environments.named import NamedEnvironment, take_whole_number, values_of
from rllm.errors import AgentError, ConfigError, raised
from rllm.types import JSONObject

_MODEL = "policy"
"""Name of the model in requests; the gateway replaces it."""
_KEY_VARIABLE = "OPENAI_API_KEY"
_OF_AGENT = {"harness": "id", "runtime": "type"}
"""Parameters that choose parts of a taskset's agent, and the field of each part that they set."""


def open_env(name: str, params: Mapping[str, str]) -> NamedEnvironment:
    """Return the tasks of an environment, and the function that lets it make rollouts.

    Args:
        name: an installed environment, such as `gsm8k` or `owner/gsm8k`; a module in the current folder, too.
        params: `size`, the number of tasks, by default all; others are arguments of `load_environment`, or settings of
            the taskset, as JSON or text. A taskset also takes its agent's `harness` and `runtime`, such as
            `harness=null&runtime=subprocess` for a plain conversation.

    Raises:
        ConfigError: if the environment is unknown or cannot be loaded, or its tasks have no end and no `size`.
    """
    own = dict(params)
    size = take_whole_number(own, "size", 0)
    parts_of_agent = {key: own[key] for key in _OF_AGENT if key in own}
    arguments = json.dumps({**values_of(own), **parts_of_agent}, sort_keys=True)
    is_legacy = hasattr(_module(name), "load_environment")
    try:
        inputs = _legacy_rows(name, arguments, size) if is_legacy else _task_indices(name, arguments, size)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(raised(f"verifiers:{name}", error)) from error
    rows = [
        {"id": f"{name}/{place}", "environment": name, "arguments": arguments, "input": each}
        for place, each in enumerate(inputs)
    ]
    if not rows:
        raise ConfigError(f"verifiers:{name} has no tasks")
    play = _play_legacy if is_legacy else _play
    return NamedEnvironment(tasks=Dataset.of_tasks(rows, name=name), agent_run_func=play)


def _module(name: str) -> Any:
    """Import the module of an environment, as verifiers finds it."""
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    for path in (f"verifiers.v1.tasksets.{module}", module):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and not path.startswith(error.name):
                raise ConfigError(
                    f"verifiers:{name} needs the package {error.name!r}, which is not installed: install it"
                ) from error
        except Exception as error:
            raise ConfigError(raised(f"import of {path}", error)) from error
    raise ConfigError(
        f"verifiers:{name}: there is no module {module!r}: install the environment's package, or run this in its folder"
    )


@lru_cache(maxsize=8)
def _legacy_environment(name: str, arguments: str) -> Any:
    import verifiers

    return verifiers.load_environment(name, **json.loads(arguments))


def _legacy_rows(name: str, arguments: str, size: int) -> list[JSONObject]:
    rows = _legacy_environment(name, arguments).get_dataset(n=size or -1)
    return [json.loads(json.dumps(dict(row), default=str)) for row in rows]


async def _play_legacy(
    *, environment: str, arguments: str, input: JSONObject, base_url: str
) -> tuple[float, JSONObject]:
    """Let `load_environment`'s environment make and score a rollout; return its reward and its metrics."""
    from verifiers.types import ClientConfig

    made = await _legacy_environment(environment, arguments).run_rollout(
        input,
        ClientConfig(api_base_url=base_url, api_key_var=_KEY_VARIABLE, max_retries=0),
        _MODEL,
        {},
    )
    if made.get("error"):
        raise AgentError(f"verifiers:{environment} failed: {_described(made['error'])}")
    metrics = made.get("metrics") or {}
    return float(made["reward"]), {key: value for key, value in metrics.items() if value is not None}


@lru_cache(maxsize=8)
def _environment(name: str, arguments: str) -> tuple[Any, list[Any]]:
    """Return an environment of `verifiers.v1` and the tasks that were read from it so far."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    taskset = {**json.loads(arguments), "id": name}
    agent = {part: {field: taskset.pop(part)} for part, field in _OF_AGENT.items() if part in taskset}
    return load_environment(resolve_env_config({"taskset": taskset, **({"agent": agent} if agent else {})})), []


def _task_indices(name: str, arguments: str, size: int) -> range:
    environment, _ = _environment(name, arguments)
    if not size and not environment.taskset.bounded:
        raise ConfigError(f"verifiers:{name} has no end of tasks: set their number with size=...")
    return range(len(_tasks(name, arguments, size or None)))


def _tasks(name: str, arguments: str, size: int | None) -> list[Any]:
    """Return the first `size` tasks, all by default, read once."""
    environment, tasks = _environment(name, arguments)
    if size is None or len(tasks) < size:
        tasks[:] = islice(environment.taskset, size)
    return tasks


class _Served:
    """Keeps an environment served as long as any rollout of an event loop needs it."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._num_users = 0
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        async with self._lock:
            if not self._num_users:
                self._serving = self._environment.serving()
                await self._serving.__aenter__()
            self._num_users += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._lock:
            self._num_users -= 1
            if not self._num_users:
                await self._serving.__aexit__(None, None, None)


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Served]] = WeakKeyDictionary()


async def _play(*, environment: str, arguments: str, input: int, base_url: str) -> tuple[float, JSONObject]:
    """Let an environment of `verifiers.v1` make and score a rollout; return its reward and the reward's parts."""
    from verifiers.v1 import EvalClientConfig, ModelContext

    env, _ = _environment(environment, arguments)
    task = _tasks(environment, arguments, input + 1)[input]
    client = EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE)
    served = _by_loop.setdefault(asyncio.get_running_loop(), {})
    async with served.setdefault(id(env), _Served(env)):
        episode = await env.run_episode(task, ModelContext(client=client, model=_MODEL))
    failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        why = _described(failed[-1]) if failed else "it did not end well"
        raise AgentError(f"verifiers:{environment} failed: {why}")
    parts = {name: reward.value for trace in episode.traces for name, reward in trace.rewards.items() if reward}
    return sum(trace.reward for trace in episode.traces), parts


def _described(error: Any) -> str:
    if isinstance(error, Mapping):
        return str(error.get("error_chain_str") or error.get("message") or dict(error))
    return f"{getattr(error, 'type', type(error).__name__)}: {getattr(error, 'message', error)}"
