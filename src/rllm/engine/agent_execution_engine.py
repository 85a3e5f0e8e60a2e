"""Roll out a `BaseAgent` in a `BaseEnv`, step by step, many at a time.

    engine = AgentExecutionEngine(agent_class=MathAgent, env_class=SingleTurnEnvironment,
                                  env_args={"reward_fn": math_reward_fn},
                                  rollout_engine=OpenAIEngine(model="policy", base_url="http://127.0.0.1:8000/v1"))
    trajectories = asyncio.run(engine.execute_tasks(tasks))

Token ids come from the engine that sampled them; nothing is tokenized here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from rllm.agents.agent import BaseAgent
from rllm.engine.capture import Capture
from rllm.engine.join import complete, warn
from rllm.engine.recording_engine import recording
from rllm.engine.request import RolloutRequest, requests_of
from rllm.engine.runner import RolloutRunner
from rllm.engine.signature import check_arguments, check_named
from rllm.engine.validation import check_trajectories, checked_metrics
from rllm.environments.base.base_env import BaseEnv, accepted_arguments, prepared_args
from rllm.errors import AgentError, ConfigError, EnvError, boundary
from rllm.inference.engine import InferenceEngine
from rllm.rewards.scoring import METADATA_KEY, PARTS_KEY, checked_reward, is_number, numbers_in
from rllm.types import VERDICT_KEY, Episode, JSONMapping, JSONObject, Task, TerminationReason, Trajectory
from rllm.workflows.environment import BlockingCalls, environment_of
from rllm.workflows.interaction import Interaction, InteractionLimits, discounted_returns

DEFAULT_TIMEOUT_S = 600.0

ENDED_BY_A_LIMIT = (
    TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
    TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
    TerminationReason.MAX_TURNS_EXCEEDED,
)


class AgentExecutionEngine:
    """`Rollout` of an agent class in an environment class; can also run tasks by itself, with `execute_tasks`."""

    def __init__(
        self,
        *,
        agent_class: type[BaseAgent],
        env_class: type[BaseEnv],
        agent_args: JSONMapping | None = None,
        env_args: JSONMapping | None = None,
        rollout_engine: InferenceEngine | None = None,
        engine_name: str = "openai",
        rollout_engine_args: JSONMapping | None = None,
        sampling_params: JSONMapping | None = None,
        n_parallel_agents: int = 128,
        max_workers: int = 64,
        max_steps: int = 5,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        enforce_max_prompt_length: bool = False,
        trajectory_timeout: float | None = None,
        overlong_filter: bool = False,
        gamma: float = 0.2,
        api_retries: int = 3,
        retry_limit: int = 3,
        capture: Capture | None = None,
        tokenizer: Any = None,
        chat_parser: Any = None,
        config: Any = None,
    ) -> None:
        """Check the two classes; nothing is started.

        Args:
            agent_class: created for every rollout, as `agent_class(**agent_args)`.
            env_class: created for every rollout, as `env_class.from_dict({**task, **env_args})`. A rollout is correct
                if the last step's info has a true `is_correct`, or else if its reward is at least 1.
            agent_args: arguments of the agent.
            env_args: arguments of the environment.
            rollout_engine: the model; by default the one of `engine_name`.
            engine_name: `openai` is an `OpenAIEngine(**rollout_engine_args)`, which also takes its `model` from
                `sampling_params`.
            api_retries: retries of a call whose server was busy or unreachable.
            rollout_engine_args: arguments of that engine.
            sampling_params: parameters of every model call, such as `temperature`.
            n_parallel_agents: rollouts running at a time.
            max_workers: blocking calls of environments running at a time in each event loop; a call that takes longer
                than a twentieth of `trajectory_timeout` no longer counts, since it may hang.
            max_steps: answers of the model in a rollout.
            max_prompt_length: tokens of the first prompt; a longer one ends the rollout.
            max_response_length: tokens of everything after the first prompt.
            enforce_max_prompt_length: apply the two lengths to every step by itself instead.
            trajectory_timeout: seconds that a rollout may take; `None` is ten minutes.
            overlong_filter: exclude rollouts that ended at a limit from training (`trainable=False`).
            gamma: discount of the steps' `mc_return`.
            retry_limit: attempts at a rollout whose inference server failed.
            capture: recording of model calls; by default in memory, during the rollout.
            tokenizer: ignored; accepted for programs written for other frameworks.
            chat_parser: ignored; see `tokenizer`.
            config: ignored; see `tokenizer`.

        Raises:
            ConfigError: if a setting is wrong; the message names it and the remedy.
        """
        check_arguments(agent_args=agent_args, env_args=env_args, rollout_engine_args=rollout_engine_args)
        check_agent_and_env(agent_class, env_class, env_args or {})
        self.agent_class, self.agent_args = agent_class, dict(agent_args or {})
        self.env_class, self.env_args = env_class, prepared_args(env_class, env_args)
        engine = rollout_engine
        if engine is None:
            model = {"model": sampling_params["model"]} if sampling_params and "model" in sampling_params else {}
            engine = _engine(engine_name, {**model, **(rollout_engine_args or {})}, api_retries)
        self.rollout_engine = recording(engine)
        self.sampling_params = dict(sampling_params or {})
        self.limits = InteractionLimits(
            max_steps=max_steps,
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            per_step=enforce_max_prompt_length,
        )
        self.overlong_filter = overlong_filter
        self.gamma = gamma
        self.capture = capture or Capture()
        self._settings: JSONObject = {
            "max_concurrent": n_parallel_agents,
            "timeout_s": DEFAULT_TIMEOUT_S if trajectory_timeout is None else trajectory_timeout,
            "num_retries": max(retry_limit, 1) - 1,
        }
        RolloutRunner(self, **self._settings)  # raises for settings that are out of range
        try:
            self._make_agent()
        except AgentError as error:
            raise ConfigError(str(error)) from error
        self._max_workers = max_workers
        self._calls: dict[asyncio.AbstractEventLoop, BlockingCalls] = {}
        self._num_running = 0

    def __enter__(self) -> Self:
        self.capture.__enter__()
        self._num_running += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._num_running -= 1
        if not self._num_running:
            for calls in self._calls.values():
                calls.close()
            self._calls.clear()
        self.capture.__exit__(*exc_info)

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        """Run one rollout of the agent in the environment of the attempt's task.

        Raises:
            AgentError: if the agent raises or breaks its protocol.
            EnvError: if the environment does.
            RewardError: if the environment's reward function raises.
            InferenceError: if the model does not answer.
        """
        calls = self._blocking_calls()
        row = {**attempt.own_task(), **self.env_args}
        async with self.capture.session(attempt) as session, environment_of(self.env_class, row, calls) as env:
            with boundary(EnvError, f"setting idx of {type(env).__name__}"):
                env.idx = attempt.index
            play = Interaction(
                agent=self._make_agent(),
                env=env,
                engine=self.rollout_engine,
                limits=self.limits,
                calls=calls,
                sampling=self.sampling_params,
            )
            try:
                reason = await play.run()
            finally:
                trajectory = play.trajectory
                attempt.trajectories.append(trajectory)
            judge = getattr(env, "compute_final_reward", None)
            if judge is not None and trajectory.steps:  # it scores the whole rollout at its end
                where = f"{type(env).__name__}.compute_final_reward"
                with boundary(EnvError, where):
                    reward = await calls.call(judge, name=where)
                trajectory.steps[-1].reward = checked_reward(reward, where, EnvError)
        check_trajectories([trajectory], self.agent_class.__name__)
        episode = self._episode(trajectory, reason, play)
        return complete(episode, attempt, await self.capture.traces(session, set()))

    def _blocking_calls(self) -> BlockingCalls:
        """Return the limiter of blocking calls in this event loop, which all its rollouts share."""
        loop = asyncio.get_running_loop()
        if loop not in self._calls:
            # Short enough that hanging calls, up to twenty per slot, leave time for the others.
            self._calls[loop] = BlockingCalls(
                self._max_workers,
                one_thread=not self.env_class.is_multithread_safe(),
                soft_timeout_s=self._settings["timeout_s"] / 20,
            )
        return self._calls[loop]

    def _make_agent(self) -> BaseAgent:
        with boundary(AgentError, f"{self.agent_class.__name__}(**agent_args)"):
            return self.agent_class(**self.agent_args)

    def _episode(self, trajectory: Trajectory, reason: TerminationReason, play: Interaction) -> Episode:
        discounted_returns(trajectory.steps, self.gamma)
        reward = trajectory.final_reward()
        if reward is not None:
            trajectory.reward = reward
        info = trajectory.steps[-1].info if trajectory.steps else {}
        parts, correct = info.get(PARTS_KEY), info.get("is_correct")
        if isinstance(parts, Mapping):
            trajectory.reward_parts = checked_metrics(parts, "the environment")
        verdict = info.get(METADATA_KEY)
        if isinstance(verdict, Mapping) and verdict:
            trajectory.info[VERDICT_KEY] = dict(verdict)
        is_correct = bool(correct) if is_number(correct) else reward is not None and reward >= 1.0
        episode = Episode(trajectories=[trajectory], termination_reason=reason, is_correct=is_correct)
        if self.overlong_filter and reason in ENDED_BY_A_LIMIT:
            trajectory.trainable = False
            episode.info["filtered"] = f"overlong_filter: the rollout ended at a limit ({reason.value})"
        if isinstance(verdict, Mapping):
            episode.metrics.update(numbers_in(verdict))
            if reward is None and "error" in verdict:
                episode.info["unscored"] = f"reward function: {verdict['error']}"
        for warning in play.warnings:
            warn(episode, warning)
        episode.metrics.update({f"timing/{name}_s": seconds for name, seconds in play.seconds.items()})
        episode.metrics["rollout/num_steps"] = float(len(trajectory.steps))
        return episode

    async def execute_tasks(
        self, tasks: Sequence[Task], *, on_episode: Callable[[Episode], None] | None = None
    ) -> list[Trajectory]:
        """Return the trajectory of each task, in order; a task given twice is rolled out twice.

        A failed rollout returns its trajectory so far, with `info["error"]` (type, message, traceback), without a
        reward, and with `trainable` False. `on_episode` is called for each rollout as it ends.
        """
        episodes = await self.execute_episodes(tasks, on_episode=on_episode)
        return [_only_trajectory(episode) for episode in episodes]

    async def execute_episodes(
        self, tasks: Sequence[Task], *, on_episode: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Return the episodes of tasks; see `execute_tasks`."""
        with self:
            return await RolloutRunner(self, **self._settings).run(requests_of(tasks), on_episode=on_episode)

    async def trajectory_generator(self, tasks: Sequence[Task]) -> AsyncIterator[Trajectory]:
        """Yield trajectories in the order in which rollouts end; leaving early cancels the rest."""
        ended: asyncio.Queue[Episode | None] = asyncio.Queue()
        work = asyncio.create_task(self.execute_episodes(tasks, on_episode=ended.put_nowait))
        work.add_done_callback(lambda _: ended.put_nowait(None))
        try:
            while (episode := await ended.get()) is not None:
                yield _only_trajectory(episode)
            await work
        finally:
            work.cancel()
            await asyncio.wait({work})


AsyncAgentExecutionEngine = AgentExecutionEngine


def _engine(name: str, arguments: JSONMapping, api_retries: int) -> InferenceEngine:
    if name != "openai":
        raise ConfigError(f"engine_name={name!r}: use 'openai', or give rollout_engine, any InferenceEngine")
    from rllm.inference.openai_engine import OpenAIEngine

    try:
        return OpenAIEngine(**{"api_retries": api_retries, **arguments})
    except TypeError as error:
        raise ConfigError(f"rollout_engine_args={dict(arguments)!r}: {error}") from error


def check_agent_and_env(agent_class: Any, env_class: Any, env_args: JSONMapping) -> None:
    """Raise `ConfigError` if a class is of the wrong kind or lacks a method, or an argument is unknown.

    Arguments are only checked for environments that declare `argument_names`.
    """
    check_agent(agent_class)
    _check_class(env_class, "env_class", ("reset", "step", "from_dict"))
    if (names := accepted_arguments(env_class)) is not None:
        check_named(env_class, "env_args", env_args, names)


def check_agent(agent_class: Any) -> None:
    """Raise `ConfigError` if a class is not an agent class."""
    _check_class(agent_class, "agent_class", ("reset", "update_from_env", "update_from_model", "trajectory"))


def _check_class(kind: object, setting: str, methods: Sequence[str]) -> None:
    if not inspect.isclass(kind):
        raise ConfigError(f"{setting}={kind!r}: pass a class; it is created for every rollout")
    missing = sorted(getattr(kind, "__abstractmethods__", ())) or [name for name in methods if not hasattr(kind, name)]
    if missing:
        raise ConfigError(f"{setting}={kind.__name__} has no {', '.join(missing)}: define what a rollout calls")


def _only_trajectory(episode: Episode) -> Trajectory:
    trajectory = episode.trajectories[0] if episode.trajectories else Trajectory()
    trajectory.task = episode.task
    trajectory.info.update({key: episode.info[key] for key in ("error", "warnings", "filtered") if key in episode.info})
    trajectory.info["termination_reason"] = episode.termination_reason.value if episode.termination_reason else None
    if episode.failed:
        trajectory.trainable = False
    return trajectory
