"""Two roles, one model: solvers that propose, and a judge that picks one of their proposals."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from rllm.rewards.countdown_reward import countdown_reward_fn
from rllm.sdk import TrajectoryView, get_chat_client_async, trajectory

client = get_chat_client_async()

NUM_SOLVERS = 2
SOLVE = "Think, then give your expression in <answer></answer>."
JUDGE = "Think, then repeat the right one of these answers, with its tags."


@trajectory(name="solver")
async def solve(problem: str) -> str:
    """Return a proposal."""
    return answer_in(await ask(SOLVE, problem))


@trajectory(name="judge")
async def judge(problem: str, proposals: Sequence[str]) -> str:
    """Return the proposal that the judge picks; an empty text if it names none of them."""
    chosen = answer_in(await ask(JUDGE, "\n".join([problem, *proposals])))
    return chosen if chosen in proposals else ""


def answer_in(text: str) -> str:
    """Return the last answer with its tags, as the reward expects it; an empty text if it is missing."""
    return "".join(re.findall(r"<answer>[^<]*</answer>", text)[-1:])


async def ask(role: str, prompt: str) -> str:
    """Return the model's answer to a prompt in its role."""
    messages: Any = [{"role": "system", "content": role}, {"role": "user", "content": prompt}]
    response = await client.chat.completions.create(model="policy", messages=messages)
    return response.choices[0].message.content or ""


async def solve_and_judge(question: str, target: int, nums: list[int], **kwargs: Any) -> list[TrajectoryView]:
    """Return the solvers, each with its own reward, and the judge with that of the proposal it picked."""
    task = {"target": target, "nums": nums}
    solvers = await asyncio.gather(*(solve(question) for _ in range(NUM_SOLVERS)))
    judged = await judge(question, [solver.result for solver in solvers])
    for role in (*solvers, judged):
        role.reward = countdown_reward_fn(task, role.result).reward
    return [*solvers, judged]
