"""`MultiTurnWorkflow`: an agent in an environment, as a workflow; and two special cases of it."""

from __future__ import annotations

from typing import Any

from rllm.agents.agent import BaseAgent
from rllm.environments.base.base_env import BaseEnv, prepared_args
from rllm.errors import ConfigError, shown
from rllm.inference.engine import InferenceEngine
from rllm.types import Episode, JSONMapping, Task, TerminationReason
from rllm.workflows.environment import BlockingCalls, calls_of, environment_of
from rllm.workflows.interaction import Interaction, InteractionLimits, discounted_returns
from rllm.workflows.workflow import TerminationEvent, Workflow


class MultiTurnWorkflow(Workflow):
    """The agent acts until the environment is done or `max_steps` answers were given.

    Subclass it if an episode is more than one such interaction; `interact` is one.
    """

    def __init__(
        self,
        rollout_engine: InferenceEngine | None = None,
        *,
        agent_cls: type[BaseAgent],
        env_cls: type[BaseEnv],
        agent_args: JSONMapping | None = None,
        env_args: JSONMapping | None = None,
        max_steps: int = 5,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        sampling_params: JSONMapping | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the agent; the environment is created for each task.

        Raises:
            ConfigError: if one of the two classes is not a class.
        """
        super().__init__(rollout_engine, **kwargs)
        for name, kind in (("agent_cls", agent_cls), ("env_cls", env_cls)):
            if not isinstance(kind, type):
                raise ConfigError(
                    f"{name}={shown(kind)}: give the class itself; rllm.trainer.env_agent_mappings has those with "
                    "short names"
                )
        self.agent = agent_cls(**dict(agent_args or {}))
        self.env_cls, self.env_args = env_cls, prepared_args(env_cls, env_args)
        self.sampling_params = dict(sampling_params or {})
        self.limits = InteractionLimits(
            max_steps=max_steps, max_prompt_length=max_prompt_length, max_response_length=max_response_length
        )
        self._calls: BlockingCalls | None = None
        """Kept, so that a thread shared by its environments lives as long as the workflow."""

    async def run(self, task: Task, uid: str, **kwargs: Any) -> Episode | None:
        """Run one interaction; the episode has the agent's trajectory, and the interaction's termination reason."""
        raise TerminationEvent(await self.interact(task))

    async def interact(self, task: Task) -> TerminationReason:
        """Play the task's environment once, with the agent reset, and return why it ended."""
        calls = self._calls = calls_of(self.env_cls)
        async with environment_of(self.env_cls, {**task, **self.env_args}, calls) as env:
            play = Interaction(
                agent=self.agent,
                env=env,
                engine=self.rollout_engine,
                limits=self.limits,
                calls=calls,
                sampling=self.sampling_params,
            )
            try:
                return await play.run()
            finally:
                self.agent.trajectory.steps = play.trajectory.steps
                discounted_returns(self.agent.trajectory.steps, self.gamma)


class SingleTurnWorkflow(MultiTurnWorkflow):
    """`MultiTurnWorkflow` of one turn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "max_steps": 1})


class CumulativeWorkflow(MultiTurnWorkflow):
    """`MultiTurnWorkflow` whose turns together may have `max_response_length` tokens, within `max_steps` turns."""

    def __init__(self, *args: Any, max_response_length: int = 8192, **kwargs: Any) -> None:
        super().__init__(*args, max_response_length=max_response_length, **kwargs)
