from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.sdk import TrajectoryView, get_chat_client_async, session, trajectory
from rllm.sdk.context import get_current_metadata
from rllm.types import Trajectory, is_scored

from .conftest import ModelServer
from .test_context import call


def test_sync_function_returns_its_trajectory() -> None:
    @trajectory(name="my_agent", version=2)
    def agent(prompt: str, *, temperature: float = 0.7) -> str:
        call("a")
        call("b")
        return prompt.upper()

    did = agent("hi")
    assert isinstance(did, TrajectoryView)
    assert (did.name, did.result, did.output) == ("my_agent", "HI", "HI")
    assert [step.id for step in did.steps] == ["a", "b"]
    assert did.reward == 0.0
    assert not is_scored(did.reward)
    assert did.input == {"prompt": "hi", "temperature": 0.7}
    assert did.metadata["version"] == 2
    did.steps[0].reward = did.reward = 1.0
    assert did.final_reward() == 1.0


async def test_bare_decorator_accepts_an_async_function() -> None:
    @trajectory
    async def agent() -> int:
        await asyncio.sleep(0)
        call("a")
        return 7

    assert inspect.iscoroutinefunction(agent)
    did = await agent()
    assert (did.name, did.result, len(did.steps)) == ("agent", 7, 1)


async def test_function_that_returns_an_awaitable_counts_as_async() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        call("b")
        return 7

    @trajectory(name="lazy")
    def agent() -> Any:
        call("a")
        return work()

    with session() as sess:
        did = await agent()
    assert (did.result, [step.id for step in did.steps]) == (7, ["a", "b"])
    assert sess.trajectories == [did]


async def test_methods_run_concurrently_in_isolation(server: ModelServer) -> None:
    class Solver:
        def __init__(self) -> None:
            self.client = get_chat_client_async(base_url=server.base_url, use_proxy=False)

        @trajectory(name="solver")
        async def solve(self, number: int) -> str | None:
            for turn in range(2):
                message: Any = {"role": "user", "content": f"{number}/{turn}"}
                # The later a solver starts, the sooner it is answered.
                sleep = {"sleep": (5 - number) / 100}
                answer = await self.client.chat.completions.create(model="m", messages=[message], extra_body=sleep)
            return answer.choices[0].message.content

    solver = Solver()
    async with solver.client:
        solved = await asyncio.gather(*(asyncio.create_task(solver.solve(number)) for number in range(5)))
    for number, did in enumerate(solved):
        assert did.input == {"number": number}
        assert did.result == f"{number}/1"
        assert [step.model_response for step in did.steps] == [f"{number}/0", f"{number}/1"]


def test_outer_trajectory_includes_the_calls_of_inner_ones() -> None:
    @trajectory(name="inner")
    def inner() -> None:
        assert get_current_metadata()["trajectory_name"] == "inner"
        call("b")

    @trajectory(name="outer")
    def outer() -> Trajectory:
        call("a")
        return inner()

    with session() as sess:
        did = outer()
    assert [step.id for step in did.steps] == ["a", "b"]
    assert [step.id for step in did.result.steps] == ["b"]
    assert [item.name for item in sess.trajectories] == ["outer", "inner"]


def test_nested_session_has_its_trajectories_once() -> None:
    @trajectory
    def solve() -> str:
        return "4"

    sess = session()
    with sess, sess:
        solved = solve()
    assert sess.trajectories == [solved]


def test_exception_is_raised_with_its_trajectory() -> None:
    @trajectory(name="fails")
    def fails() -> None:
        call("a")
        raise ValueError("no luck")

    with session() as sess, pytest.raises(ValueError, match="no luck") as raised:
        fails()
    assert [step.id for step in raised.value.trajectory.steps] == ["a"]  # type: ignore[attr-defined]
    assert sess.trajectories == [raised.value.trajectory]  # type: ignore[attr-defined]
    assert sess.trajectories[0].info["error"] == "ValueError: no luck"


def test_wrong_arguments_fail_as_without_the_decorator() -> None:
    @trajectory
    def agent(prompt: str) -> None: ...

    with pytest.raises(TypeError, match=r"agent\(\) missing 1 required positional argument: 'prompt'"):
        agent()  # type: ignore[call-arg]


def test_generator_functions_are_rejected() -> None:
    def stream() -> Any:
        yield 1

    with pytest.raises(ConfigError, match="generator"):
        trajectory(stream)
