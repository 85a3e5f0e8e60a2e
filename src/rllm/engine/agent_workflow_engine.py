"""`AgentWorkflowEngine`: rollouts of a `Workflow` class, with a reusable object for each one that is running.

engine = AgentWorkflowEngine(workflow_cls=SolverJudge, rollout_engine=OpenAIEngine(model="policy", base_url=...))
episodes = asyncio.run(engine.execute_tasks(tasks))
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

from rllm.agents.agent import BaseAgent
from rllm.engine.capture import Capture
from rllm.engine.episode_log import EpisodeLog
from rllm.engine.join import awaited_ids, complete
from rllm.engine.recording_engine import recording
from rllm.engine.request import RolloutRequest, requests_of
from rllm.engine.runner import RolloutRunner
from rllm.engine.signature import check_arguments
from rllm.engine.validation import check_episode
from rllm.errors import AgentError, ConfigError, PromptTooLongError, RolloutError, RolloutTimeout, boundary, raised
from rllm.inference.engine import InferenceEngine
from rllm.types import Episode, JSONMapping, JSONObject, Task, Trajectory
from rllm.workflows.workflow import Workflow

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 3600.0


class AgentWorkflowEngine:
    """`Rollout` of a workflow class; can also run tasks by itself, with `execute_tasks`."""

    def __init__(
        self,
        workflow_cls: type[Workflow],
        workflow_args: JSONMapping | None = None,
        rollout_engine: InferenceEngine | None = None,
        config: Any = None,
        *,
        n_parallel_tasks: int = 128,
        retry_limit: int = 3,
        raise_on_error: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        episode_logger: EpisodeLog | None = None,
        capture: Capture | None = None,
    ) -> None:
        """Check the class, and create a first object of it; nothing is started.

        Args:
            workflow_cls: a subclass of `Workflow`.
            workflow_args: more arguments of its constructor.
            rollout_engine: the model, whose calls are recorded; `None` for workflows with clients of their own.
            config: ignored; accepted for programs written for other frameworks.
            n_parallel_tasks: workflows running at a time.
            retry_limit: attempts at a rollout that raises; one that times out is not retried.
            raise_on_error: make `execute_tasks` raise after all rollouts have ended, if one failed for good.
            timeout_s: seconds that a rollout may take, hung threads included.
            episode_logger: log of every episode, or any object with its method `append`.
            capture: recording of model calls; by default in memory, during the rollout.

        Raises:
            ConfigError: if a setting is wrong; the message names it and the remedy.
        """
        check_workflow(workflow_cls)
        check_arguments(workflow_args=workflow_args)
        self.workflow_cls, self.workflow_args = workflow_cls, dict(workflow_args or {})
        self.rollout_engine = None if rollout_engine is None else recording(rollout_engine)
        self.raise_on_error = raise_on_error
        self.episode_logger = episode_logger
        self.capture = capture or Capture()
        self.max_concurrent = n_parallel_tasks if workflow_cls.is_multithread_safe() else 1
        self._settings: JSONObject = {
            "max_concurrent": self.max_concurrent,
            "timeout_s": timeout_s,
            "num_retries": max(retry_limit, 1) - 1,
            "retry_delay_s": 0.0,
            "retry_if": is_worth_another_try,
        }
        RolloutRunner(self, **self._settings)  # raises for settings that are out of range
        self._agents: WeakValueDictionary[int, BaseAgent] = WeakValueDictionary()
        self._labels: JSONObject = {}
        try:
            self._idle = [self._new_workflow()]
        except AgentError as error:
            raise ConfigError(str(error)) from error

    def __enter__(self) -> Self:
        self.capture.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.capture.__exit__(*exc_info)

    def set_training_step(self, step: int, mode: str = "train", epoch: int = 0) -> None:
        """Label later episodes, in `info["training"]`."""
        self._labels = {"training": {"step": step, "mode": mode, "epoch": epoch}}

    async def rollout(self, attempt: RolloutRequest, **run_args: object) -> Episode:
        """Run a workflow once; `run_args` are for its `run`.

        Raises:
            RolloutError: raised by the workflow, or an `AgentError` for any other error; its trajectories so far are in
                `attempt.trajectories`.
        """
        uid = f"{attempt.task_id}:{attempt.index}"
        async with self.capture.session(attempt) as session:
            workflow = self._idle.pop() if self._idle else self._new_workflow()
            task = attempt.own_task()
            with boundary(AgentError, f"{self._name}.reset"):
                workflow.reset(task=task, uid=uid)
            try:
                with boundary(AgentError, f"{self._name}.run_with_termination_handling"):
                    episode = await workflow.run_with_termination_handling(task, uid, **run_args)
            except BaseException:
                attempt.trajectories.extend(self._done_by(workflow))
                raise
            self._check(workflow, episode, attempt)
            self._idle.append(workflow)  # a cancelled one may still be used by a thread, and is discarded
        traces = await self.capture.traces(session, awaited_ids(episode, attempt, session.llm_calls))
        return complete(episode, attempt, traces, seen=session.llm_calls)

    def _check(self, workflow: Workflow, episode: object, attempt: RolloutRequest) -> None:
        """Raise the error that ended the workflow, so that it may be retried."""
        if not isinstance(episode, Episode):
            raise AgentError(
                f"{self._name}.run_with_termination_handling returned {episode!r:.100} of type "
                f"{type(episode).__name__}: return an Episode"
            )
        if isinstance(episode.trajectories, list):
            attempt.trajectories.extend(path for path in episode.trajectories if isinstance(path, Trajectory))
        error = getattr(workflow, "error", None)
        if isinstance(error, RolloutError):
            raise error
        if error is not None:
            raise AgentError(raised(f"{self._name}.run", error)) from error
        check_episode(episode, self._name)
        if not episode.trajectories:
            raise AgentError(
                f"{self._name}.run ended without a trajectory: return an Episode, or call self.commit(name, "
                "trajectory=...)"
            )

    def _done_by(self, workflow: Workflow) -> list[Trajectory]:
        """Return the trajectories of a cancelled workflow, if it can collect them."""
        try:
            return workflow.collect_trajectories().trajectories
        except Exception as error:  # the error to report is the one that cancelled it
            logger.warning("%s", raised(f"{self._name}.collect_trajectories", error))
            return []

    def _new_workflow(self) -> Workflow:
        with boundary(AgentError, f"{self._name}(**workflow_args)"):
            workflow = self.workflow_cls(rollout_engine=self.rollout_engine, executor=None, **self.workflow_args)
        agents = {name: value for name, value in vars(workflow).items() if isinstance(value, BaseAgent)}
        for name, agent in agents.items():
            if id(agent) in self._agents and self.max_concurrent > 1:
                raise AgentError(
                    f"{self._name}.{name} is one {type(agent).__name__} object for all rollouts, which run at the same "
                    "time: make it in __init__, or use n_parallel_tasks=1"
                )
        self._agents.update({id(agent): agent for agent in agents.values()})
        return workflow

    @property
    def _name(self) -> str:
        return self.workflow_cls.__name__

    async def execute_tasks(
        self,
        tasks: Sequence[Task],
        task_ids: Sequence[str] | None = None,
        *,
        on_episode: Callable[[Episode], None] | None = None,
        **kwargs: object,
    ) -> list[Episode]:
        """Return the episode of each task, in order; a task given twice is rolled out twice.

        Args:
            tasks: rows.
            task_ids: one for each; by default a task's own `task_id` or `id`, else its position.
            on_episode: called with each episode as it ends.
            **kwargs: arguments of `Workflow.run`.

        Raises:
            RolloutError: with `raise_on_error`, after all have ended, if some failed.
        """

        def finish(episode: Episode) -> None:
            episode.info.update(self._labels)
            if self.episode_logger is not None:
                self.episode_logger.append(episode)
            if on_episode is not None:
                on_episode(episode)

        with self:
            runner = RolloutRunner(_WithArguments(self, kwargs), **self._settings)
            episodes = await runner.run(requests_of(tasks, task_ids), on_episode=finish)
        failed = [episode for episode in episodes if episode.failed]
        if failed and self.raise_on_error:
            error = failed[0].info["error"]
            raise RolloutError(
                f"{len(failed)} of {len(episodes)} rollouts failed; {failed[0].id}: {error['type']}: {error['message']}"
            )
        return episodes


@dataclass(frozen=True)
class _WithArguments:
    """Rollouts of one call of `execute_tasks`, with its arguments for `run`."""

    engine: AgentWorkflowEngine
    run_args: JSONObject

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        return await self.engine.rollout(attempt, **self.run_args)


def check_workflow(workflow_cls: object) -> None:
    """Raise `ConfigError` for anything but a workflow class with all its methods."""
    if not (inspect.isclass(workflow_cls) and issubclass(workflow_cls, Workflow)):
        raise ConfigError(f"workflow_cls={workflow_cls!r}: pass a subclass of rllm.workflows.workflow.Workflow")
    if inspect.isabstract(workflow_cls):
        missing = ", ".join(sorted(workflow_cls.__abstractmethods__))
        raise ConfigError(f"workflow_cls={workflow_cls.__name__} has no {missing}: define what a rollout calls")
    if not inspect.iscoroutinefunction(workflow_cls.run):
        raise ConfigError(f"{workflow_cls.__name__}.run is not a coroutine: write `async def run(self, task, uid)`")


def is_worth_another_try(error: RolloutError) -> bool:
    """Return whether a failed workflow is retried: not after a timeout or a prompt that is too long."""
    return not isinstance(error, RolloutTimeout | PromptTooLongError)
