"""Sources of episodes: a function, an agent in an environment, a workflow. The training loop is the same for all."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from rllm.agents.agent import BaseAgent
from rllm.config.schema import RolloutConfig
from rllm.data.dataset import Dataset
from rllm.engine.agent_execution_engine import AgentExecutionEngine, check_agent, check_agent_and_env
from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.agent_workflow_engine import AgentWorkflowEngine, check_workflow, is_worth_another_try
from rllm.engine.capture import GatewayCapture, SessionGateway
from rllm.engine.recording_engine import RecordingEngine, recording
from rllm.engine.runner import Rollout
from rllm.engine.signature import check_arguments, check_made_with, check_rows, name_of
from rllm.engine.validation import check_promise
from rllm.environments.base.base_env import BaseEnv, check_first_task, prepared_args
from rllm.environments.named import NamedEnvironment
from rllm.errors import ConfigError, RolloutError
from rllm.inference.engine import InferenceEngine
from rllm.rewards.scoring import AnyReward, reward_function_of, without_address
from rllm.store.base import TraceStore
from rllm.types import JSONMapping, JSONObject
from rllm.workflows.environment import BlockingCalls, environment_of
from rllm.workflows.workflow import Workflow

if TYPE_CHECKING:  # torch takes seconds to import, and an evaluation against a server does not need it
    from rllm.algorithms.base import Algorithm
    from rllm.backends.base import TrainingBackend
    from rllm.trainer.credit import Roles
    from rllm.trainer.metrics import EpisodeMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutContext:
    """Services of a run for its rollouts."""

    inference: InferenceEngine
    gateway: SessionGateway
    store: TraceStore
    rollout: RolloutConfig

    @property
    def recorded(self) -> RecordingEngine:
        """Engine that records its calls, for rollouts that call the policy without HTTP."""
        return recording(self.inference, store=self.store)

    @property
    def capture(self) -> GatewayCapture:
        return GatewayCapture(self.gateway, self.store)


class RolloutSource(ABC):
    """Source of episodes, with its arguments checked."""

    retry_if: Callable[[RolloutError], bool] | None = None
    """Predicate of failures worth another try; `None` leaves it to the runner."""
    demonstrates: ClassVar[bool] = False
    """Episodes are demonstrations, not rollouts of the policy."""

    @property
    def max_parallel(self) -> int | None:
        """Number of rollouts that one process may run at a time; `None` for any number."""
        return None

    @property
    def reward(self) -> AnyReward | None:
        """Reward function that the agent brings (see `with_reward`)."""
        return None

    @property
    def arguments(self) -> Iterable[object]:
        """Values that it passes to environments or workflows; one of them may be a judge."""
        return ()

    @abstractmethod
    def check(self, data: Dataset) -> None:
        """Raise `ConfigError` if these tasks cannot be rolled out."""

    @abstractmethod
    def open(self, context: RolloutContext) -> AbstractContextManager[Rollout]:
        """Return the rollouts of a run, which work inside `with`; raise `ConfigError` if a part does not fit."""

    def episode_metrics(self, algorithm: Algorithm, backend: TrainingBackend, roles: Roles) -> EpisodeMetrics:
        """Return the metrics of these episodes."""
        from rllm.trainer.metrics import EpisodeMetrics

        return EpisodeMetrics(needs_rewards=algorithm.needs_rewards)


@dataclass(frozen=True, kw_only=True)
class FunctionSource(RolloutSource):
    """`agent_run_func`."""

    agent_run_func: Callable[..., object]

    @property
    def reward(self) -> AnyReward | None:
        return reward_function_of(self.agent_run_func)

    def check(self, data: Dataset) -> None:
        check_rows(self.agent_run_func, data)

    def open(self, context: RolloutContext) -> AbstractContextManager[Rollout]:
        if context.rollout.max_steps is not None:
            logger.warning("rollout.max_steps=%d has no effect: a function ends by itself", context.rollout.max_steps)
        return AgentFunctionEngine(self.agent_run_func, gateway=context.gateway, store=context.store)


@dataclass(frozen=True)
class InEnvironment:
    """Agent function that calls another one with the fields of the task and its environment, `env`, which it closes."""

    func: Callable[..., object]
    """The function; `signature.name_of` reads it by this name, which `functools.partial` uses, too."""
    env_class: type[BaseEnv]
    env_args: JSONMapping

    @property
    def __signature__(self) -> inspect.Signature:
        """Parameters of the function but for its environment: fields of the task, and perhaps `base_url`."""
        signature = inspect.signature(self.func)
        return signature.replace(parameters=[item for name, item in signature.parameters.items() if name != "env"])

    @cached_property
    def _prepared(self) -> JSONObject:
        """Arguments of the environment, with the code that they name imported in the process of the rollouts."""
        return prepared_args(self.env_class, self.env_args)

    async def __call__(self, **task: Any) -> object:
        calls = BlockingCalls()
        row = {**without_address(task), **self._prepared}
        try:
            async with environment_of(self.env_class, row, calls) as env:
                play = partial(self.func, **task, env=env)
                return await calls.call(play, name=name_of(self.func))
        finally:
            calls.close()


@dataclass(frozen=True, kw_only=True)
class AgentEnvSource(RolloutSource):
    """`agent_class` and `env_class`."""

    agent_class: type[BaseAgent]
    env_class: type[BaseEnv]
    agent_args: JSONMapping = field(default_factory=dict)
    env_args: JSONMapping = field(default_factory=dict)
    max_steps: int = 5
    """Value of `rollout.max_steps=None`."""

    @property
    def arguments(self) -> Iterable[object]:
        return self.env_args.values()

    def check(self, data: Dataset) -> None:
        """Let the environment class check the first task."""
        check_first_task(self.env_class, {**data[0], **prepared_args(self.env_class, self.env_args)})

    def open(self, context: RolloutContext) -> AbstractContextManager[Rollout]:
        return AgentExecutionEngine(
            agent_class=self.agent_class,
            env_class=self.env_class,
            agent_args=self.agent_args,
            env_args=self.env_args,
            rollout_engine=context.recorded,
            capture=context.capture,
            max_workers=context.rollout.max_concurrent,
            trajectory_timeout=context.rollout.timeout_s,
            max_steps=context.rollout.max_steps or self.max_steps,
        )


@dataclass(frozen=True, kw_only=True)
class WorkflowSource(RolloutSource):
    """`workflow_class`."""

    workflow_class: type[Workflow]
    workflow_args: JSONMapping = field(default_factory=dict)
    retry_if = staticmethod(is_worth_another_try)

    @property
    def max_parallel(self) -> int | None:
        return None if self.workflow_class.is_multithread_safe() else 1

    @property
    def arguments(self) -> Iterable[object]:
        return self.workflow_args.values()

    def check(self, data: Dataset) -> None:
        """Accept any task."""

    def open(self, context: RolloutContext) -> AbstractContextManager[Rollout]:
        if context.rollout.max_steps is not None:
            logger.warning(
                "rollout.max_steps=%d has no effect on a workflow: pass its own argument in workflow_args",
                context.rollout.max_steps,
            )
        return AgentWorkflowEngine(
            self.workflow_class,
            self.workflow_args,
            context.recorded,
            n_parallel_tasks=context.rollout.max_concurrent,
            capture=context.capture,
        )


def source_in(
    env: NamedEnvironment,
    *,
    agent_run_func: Callable[..., object] | None = None,
    agent_class: type[BaseAgent] | None = None,
    agent_args: JSONMapping | None = None,
) -> RolloutSource:
    """Return the source of an environment's rollouts, by its own agent or the given one.

    Raises `ConfigError` if the agent does not fit.
    """
    if env.agent_run_func is not None:
        if agent_run_func is not None or agent_class is not None:
            raise ConfigError(
                "this environment makes its rollouts by itself; leave out the agent, or for tasks, name it in the "
                "environment's name: tasks:DIR?agent=FILE.py:function"
            )
        return FunctionSource(agent_run_func=env.agent_run_func)
    assert env.env_class is not None
    if agent_run_func is not None:
        return FunctionSource(agent_run_func=InEnvironment(agent_run_func, env.env_class, env.env_args))
    if agent_class is None:
        agent_class, agent_args = env.agent_class, {**env.agent_args, **(agent_args or {})}
    check_agent(agent_class)
    check_made_with(agent_class, "agent_args", agent_args or {})
    return AgentEnvSource(
        agent_class=agent_class,
        env_class=env.env_class,
        agent_args=dict(agent_args or {}),
        env_args=env.env_args,
        max_steps=env.max_steps,
    )


def rollout_source(
    *,
    source: RolloutSource | None = None,
    agent_run_func: Callable[..., object] | None,
    agent_class: type[BaseAgent] | None,
    env_class: type[BaseEnv] | None,
    agent_args: JSONMapping | None,
    env_args: JSONMapping | None,
    workflow_class: type[Workflow] | None,
    workflow_args: JSONMapping | None,
) -> RolloutSource:
    """Return the one source that the arguments give; raise `ConfigError` for none or several."""
    sources = {
        "agent_run_func": agent_run_func,
        "agent_class and env_class": agent_class or env_class,
        "workflow_class": workflow_class,
        "source": source,
    }
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        problem = f"{' and '.join(given)} were given" if given else "nothing to roll out was given"
        raise ConfigError(f"{problem}: give one of {', '.join(sources)}")
    check_arguments(agent_args=agent_args, env_args=env_args, workflow_args=workflow_args)
    if source is not None:
        return source
    if agent_run_func is not None:
        if not callable(agent_run_func):
            raise ConfigError(f"agent_run_func={agent_run_func!r}: use a function, such as `def f(question)`")
        check_promise(agent_run_func, name_of(agent_run_func))
        return FunctionSource(agent_run_func=agent_run_func)
    if workflow_class is not None:
        check_workflow(workflow_class)
        check_made_with(workflow_class, "workflow_args", workflow_args or {}, rollout_engine=None, executor=None)
        return WorkflowSource(workflow_class=workflow_class, workflow_args=dict(workflow_args or {}))
    if agent_class is None or env_class is None:
        missing = "agent_class" if agent_class is None else "env_class"
        raise ConfigError(f"{missing} is missing: an agent and its environment are given together")
    check_agent_and_env(agent_class, env_class, env_args or {})
    check_made_with(agent_class, "agent_args", agent_args or {})
    return AgentEnvSource(
        agent_class=agent_class, env_class=env_class, agent_args=dict(agent_args or {}), env_args=dict(env_args or {})
    )
