"""Training during rollouts: the same loop, with the rollouts of later steps started before earlier ones are trained on.

The rollouts of step k may start once step k - `max_staleness` is reached, so that every token is trained at most
`max_staleness` publishes after the weights that sampled it. Unfinished answers continue under newly published weights,
which the trace records (`Trace.weight_updates`). Steps are trained in order, each on all rollouts of its own tasks: a
batch of the first to finish would prefer short answers, and could not be repeated.

With `max_staleness=0` no rollout starts early, which equals `TrainingLoop` bit for bit.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rllm.trainer.loop import TrainingLoop
from rllm.types import Episode


@dataclass(kw_only=True)
class AsyncTrainingLoop(TrainingLoop):
    """A `TrainingLoop` whose rollouts run ahead of the updates by at most `config.rollout.max_staleness` steps."""

    _ahead: dict[int, asyncio.Task[list[Episode]]] = field(default_factory=dict, init=False)
    """Rollouts in progress, by step."""
    _session_before: dict[int, str | None] = field(default_factory=dict, init=False)
    """Newest session when the rollouts of each of these steps were started."""

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            for task in self._ahead.values():
                task.cancel()
            await asyncio.gather(*self._ahead.values(), return_exceptions=True)

    async def _episodes_of(self, step: int) -> list[Episode]:
        last = min(step + self.config.rollout.max_staleness, self.config.num_steps - 1)
        for number in range(step, last + 1):
            if number not in self._ahead:
                self._session_before[number] = await super()._last_session()
                self._ahead[number] = asyncio.create_task(
                    super()._episodes_of(number), name=f"rollouts of step {number}"
                )
        episodes = await self._ahead[step]
        del self._ahead[step], self._session_before[step]
        return episodes

    async def _last_session(self) -> str | None:
        if self.steps_done in self._session_before:
            return self._session_before[self.steps_done]
        return await super()._last_session()
