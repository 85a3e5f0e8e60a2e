"""A proposer that answers, and a checker that accepts or sends back: one workflow, and a reward for each of the two."""

from __future__ import annotations

from typing import Any

from rllm.inference.engine import InferenceEngine
from rllm.types import Episode, Message, Step, Task, Trajectory
from rllm.workflows.workflow import TerminationEvent, TerminationReason, Workflow

PROPOSE = "Name the highest bid."
CHECK = "Is this the highest bid? Say yes or no."
SENT_BACK = "No. Try again."


class ProposeAndCheck(Workflow):
    """Workflow of a proposer that tries until a checker accepts, at most `max_tries` times; the last bid is the answer."""

    def __init__(self, rollout_engine: InferenceEngine | None = None, *, max_tries: int = 2, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.max_tries = max_tries

    async def run(self, task: Task, uid: str, **kwargs: Any) -> Episode | None:
        talk = conversation(PROPOSE, task["question"])
        for _ in range(self.max_tries):
            proposal = await self.ask(talk)
            verdict = await self.ask(conversation(CHECK, f"{task['question']}. Answer: {proposal.action}"))
            # Scoring may block, for example on a database, so it runs outside of the event loop.
            right = await self.run_in_executor(is_right, task, proposal.action)
            accepted = verdict.action == "yes"
            self.commit("proposer", trajectory=Trajectory(steps=[proposal], reward=float(right)))
            self.commit("checker", trajectory=Trajectory(steps=[verdict], reward=float(accepted == right)))
            if accepted:
                return self.collect_trajectories()
            talk = [*proposal.chat_completions, {"role": "user", "content": SENT_BACK}]
        raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)

    async def ask(self, messages: list[Message]) -> Step:
        """Return one answer of the model, as a step with its tokens."""
        output = await self.rollout_engine.get_model_response(messages)
        return Step.from_model_output(output, messages, action=output.content.strip())

    def assign_episode_correctness(self, episode: Episode) -> None:
        """Decide by the last proposal, regardless of the checker's reward."""
        proposals = [trajectory for trajectory in episode.trajectories if trajectory.name == "proposer"]
        episode.is_correct = bool(proposals) and proposals[-1].reward == 1.0

    def collect_metrics(self, episode: Episode) -> None:
        """Add the number of tries to the mean reward of each role."""
        super().collect_metrics(episode)
        episode.metrics["num_tries"] = sum(trajectory.name == "proposer" for trajectory in episode.trajectories)


def conversation(system: str, text: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def is_right(task: Task, answer: str) -> bool:
    return bool(answer == task["answer"])
