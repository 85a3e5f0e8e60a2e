"""Code in the style of the SDK's published tutorials: its imports, calls and results work here.

Outside of training it talks to a plain OpenAI-compatible server; in training the same calls are redirected to the gateway.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

import rllm.data
import rllm.trainer
from rllm.algorithms import grpo
from rllm.data.dataset import Dataset, DatasetRegistry
from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream.engine import EngineUpstream
from rllm.rewards.countdown_reward import countdown_reward_fn
from rllm.rewards.reward_fn import math_reward_fn
from rllm.rewards.search_reward import RewardConfig, RewardInput, RewardSearchFn
from rllm.sdk import StepView, TrajectoryView, environment, get_chat_client, get_chat_client_async, session, trajectory
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.credit import assemble
from rllm.types import Action, Episode, is_scored
from rllm.workflows.workflow import Workflow

from .conftest import ModelServer

PROXY = "http://localhost:4000/v1"
"""Address of the tutorials' clients. In training nothing listens there: sessions redirect calls to the gateway."""

COUNTDOWN = {"question": "Reach 12 with 3 and 9.", "target": 12, "nums": [3, 9]}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# The maths tutorial


def generate_response(prompt: str, base_url: str = PROXY, **options: Any) -> str:
    client = get_chat_client(base_url=base_url, api_key="EMPTY", **options)
    with client:
        response = client.chat.completions.create(model="m", messages=user(prompt))
    return response.choices[0].message.content or ""


def rollout(**kwargs: Any) -> float:
    response = generate_response(kwargs["question"])
    return math_reward_fn({"ground_truth": kwargs["ground_truth"]}, response).reward


# The solver-judge tutorial


class Solver:
    def __init__(self, **options: Any) -> None:
        self.client = get_chat_client_async(base_url=PROXY, api_key="EMPTY", **options)

    @trajectory(name="solver")
    async def generate_solution(self, problem: str) -> str:
        response = await self.client.chat.completions.create(model="m", messages=user(f"{problem} Solve it."))
        return parsed(response.choices[0].message.content)

    async def generate_solutions(self, problem: str, n_solutions: int = 2) -> list[TrajectoryView]:
        tasks = [asyncio.create_task(self.generate_solution(problem)) for _ in range(n_solutions)]
        return await asyncio.gather(*tasks)


class Judge:
    def __init__(self) -> None:
        self.client = get_chat_client_async(base_url=PROXY, api_key="EMPTY")

    @trajectory(name="judge")
    async def judge_solutions(self, problem: str, solutions: list[str]) -> str:
        listed = "\n".join(f"Solution {number}: {text}" for number, text in enumerate(solutions, 1))
        response = await self.client.chat.completions.create(model="m", messages=user(f"{problem} Judge.\n{listed}"))
        chosen = int(re.findall(r"\d+", parsed(response.choices[0].message.content))[0])
        return solutions[chosen - 1]


def parsed(text: str | None) -> str:
    return "".join(re.findall(r"<answer>.*?</answer>", text or "")[-1:])


class SolverJudgeWorkflow(Workflow):
    def __init__(self, rollout_engine: Any, executor: Any, n_solutions: int = 2, **kwargs: Any) -> None:
        super().__init__(rollout_engine, executor, **kwargs)
        self.n_solutions = n_solutions
        self.solver = Solver()
        self.judge = Judge()

    async def run(self, task: dict[str, Any], uid: str = "", **kwargs: Any) -> Any:
        async with self.solver.client, self.judge.client:
            solver_trajs = await self.solver.generate_solutions(task["question"], self.n_solutions)
            for traj in solver_trajs:
                reward = countdown_reward_fn(task, traj.result).reward
                traj.steps[0].reward = reward
                traj.reward = reward
            judge_traj = await self.judge.judge_solutions(task["question"], [traj.result for traj in solver_trajs])
            judge_traj.steps[0].reward = judge_traj.reward = countdown_reward_fn(task, judge_traj.result).reward
        return solver_trajs + [judge_traj]  # noqa: RUF005  # as it is published


async def run_workflow(**kwargs: Any) -> list[TrajectoryView]:
    workflow = SolverJudgeWorkflow(rollout_engine=None, executor=None, n_solutions=2)
    returned: list[TrajectoryView] = await workflow.run(kwargs, uid="")
    return returned


async def run_workflow_by_sessions(**kwargs: Any) -> list[TrajectoryView]:
    """Run the variant with sessions instead of decorators."""

    async def solution() -> TrajectoryView:
        with session(agent="solver", groupby_key=str(uuid.uuid4())) as sess:
            response = await client.chat.completions.create(model="m", messages=user("Solve it."))
        step = sess.steps[0]
        step.action = Action(parsed(response.choices[0].message.content))
        step.reward = countdown_reward_fn(kwargs, step.action).reward
        return TrajectoryView(name="solver", steps=[step])

    async with get_chat_client_async(base_url=PROXY, api_key="EMPTY") as client:
        return list(await asyncio.gather(*(solution() for _ in range(3))))


class SolverJudgeModel:
    """Model whose solvers are alternately right and wrong, and whose judge knows the right answer."""

    def __init__(self) -> None:
        self.num_solvers = 0

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        prompt = messages[-1]["content"]
        if "Judge." in prompt:
            return f"<answer>{1 if 'Solution 1: <answer>3 + 9</answer>' in prompt else 2}</answer>"
        self.num_solvers += 1
        return f"Number {self.num_solvers}: <answer>{'3 + 9' if self.num_solvers % 2 else '3 * 9'}</answer>"


# Training, for the tutorials' code

RollOut = Callable[..., Awaitable[list[Episode]]]


@pytest.fixture
def roll_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[RollOut]:
    """`await roll_out(function, script, task, n=2)`: the episodes of `n` rollouts of a task through the gateway."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    scripted = ScriptedEngine(lambda messages: script[0](messages))
    script: list[Callable[[Any], str]] = []
    store = MemoryTraceStore()

    async def run(function: Any, answer: Callable[[Any], str], task: dict[str, Any], n: int = 2) -> list[Episode]:
        script[:] = [answer]
        attempts = [RolloutRequest(task=task, task_id="t", index=index) for index in range(n)]
        with AgentFunctionEngine(function, gateway=gateway, store=store) as engine:
            return await RolloutRunner(engine, retry_delay_s=0).run(attempts)

    with GatewayServer(store, EngineUpstream(scripted, "policy")) as gateway:
        yield run


def answers_of(trajectory: TrajectoryView) -> list[str]:
    """Return the text of the tokens to be trained."""
    return [decode(step.response_ids) for step in trajectory.steps]


# A.0: common to all tutorials


def test_reexported_names_are_the_same_object() -> None:
    assert rllm.data.DatasetRegistry is DatasetRegistry
    assert rllm.trainer.AgentTrainer is AgentTrainer


@pytest.mark.parametrize("use_proxy", [True, False])
def test_call_outside_of_sessions_is_unchanged(server: ModelServer, use_proxy: bool) -> None:
    with get_chat_client(base_url=server.base_url, api_key="EMPTY", use_proxy=use_proxy) as client:
        assert isinstance(client, openai.OpenAI)
        response = client.chat.completions.create(model="m", messages=user("hello"))
    assert isinstance(response, ChatCompletion)
    assert response.choices[0].message.content == "hello"
    assert server.received[0].path == "/v1/chat/completions"
    assert not [name for name in server.received[0].headers if name.startswith("x-rllm")]


async def test_clients_find_the_current_session(roll_out: RollOut) -> None:
    made_outside = get_chat_client_async(base_url=PROXY, api_key="EMPTY")
    on_self = Solver()

    async def agent(question: str) -> float:
        async with get_chat_client_async(base_url=PROXY, api_key="EMPTY") as made_inside:
            for client in (made_outside, on_self.client, made_inside):
                await client.chat.completions.create(model="m", messages=user(question))
        return 1.0

    async with made_outside, on_self.client:
        episodes = await roll_out(agent, lambda messages: "yes", {"question": "Ready?"}, n=4)
    assert [answers_of(trajectory) for episode in episodes for trajectory in episode.trajectories] == [["yes"] * 3] * 4
    assert len({episode.session_id for episode in episodes}) == 4


# A.1: the maths tutorial


def test_generate_response_works_outside_of_sessions(server: ModelServer) -> None:
    assert generate_response("What is 2 + 2?", server.base_url) == "What is 2 + 2?"
    assert generate_response("What is 2 + 2?", server.base_url, use_proxy=False) == "What is 2 + 2?"


@pytest.mark.parametrize(
    ("response", "reward"),
    [(r"The answer is \boxed{4}", 1.0), ("After calculation, I get 4", 0.0), (r"\boxed{5}", 0.0)],
)
def test_maths_answers_have_their_rewards(response: str, reward: float) -> None:
    assert math_reward_fn({"ground_truth": "4"}, response).reward == reward
    assert math_reward_fn({"ground_truth": "4"}, Action(response)).reward == reward


async def test_rollout_gets_its_row_and_returns_its_reward(roll_out: RollOut) -> None:
    answers = iter([r"It is \boxed{4}.", r"It is \boxed{5}."])
    row = {"question": "What is 2 + 2?", "ground_truth": "4", "data_source": "math", "level": 1}
    right, wrong = sorted(
        await roll_out(rollout, lambda messages: next(answers), row), key=lambda episode: not episode.is_correct
    )
    assert (right.is_correct, right.trajectories[0].reward) == (True, 1.0)
    assert (wrong.is_correct, wrong.trajectories[0].reward) == (False, 0.0)
    assert answers_of(right.trajectories[0]) == [r"It is \boxed{4}."]
    assert right.trajectories[0].steps[0].prompt_ids


@pytest.mark.parametrize(("returned", "is_correct"), [(1.0, True), (1, True), (True, True), (0.5, False), (0, False)])
async def test_numbers_are_rewards(roll_out: RollOut, returned: float, is_correct: bool) -> None:
    def agent(question: str) -> float:
        generate_response(question)
        return returned

    (episode,) = await roll_out(agent, lambda messages: "4", {"question": "?"}, n=1)
    assert episode.trajectories[0].reward == float(returned)
    assert episode.is_correct is is_correct


def test_unregistered_dataset_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    assert DatasetRegistry.load_dataset("hendrycks_math", "train") is None
    DatasetRegistry.register_dataset("hendrycks_math", [{"question": "?", "ground_truth": "4"}], "train")
    loaded = DatasetRegistry.load_dataset("hendrycks_math", "train")
    assert isinstance(loaded, Dataset)
    assert loaded


# A.2: the solver-judge tutorial


def test_decorated_function_returns_its_trajectory(server: ModelServer) -> None:
    @trajectory(name="my_agent")
    def agent(prompt: str) -> str:
        first = generate_response(prompt, server.base_url)
        return generate_response(f"{first}!", server.base_url)

    traj = agent("hello")
    assert isinstance(traj, TrajectoryView)
    assert all(isinstance(step, StepView) for step in traj.steps)
    assert (traj.name, traj.result, traj.reward, len(traj.steps)) == ("my_agent", "hello!", 0.0, 2)
    assert [step.output["message"]["content"] for step in traj.steps] == ["hello", "hello!"]
    assert [step.output["choices"][0]["message"]["content"] for step in traj.steps] == ["hello", "hello!"]
    assert not is_scored(traj.reward), "it reads as 0.0 and is unscored"
    traj.steps[0].reward, traj.reward = 0.5, 1.0
    assert (traj.steps[0].reward, traj.reward) == (0.5, 1.0)


def test_steps_without_proxy_have_the_tokens_of_the_server(server: ModelServer) -> None:
    traj = trajectory(name="t")(generate_response)("hello", server.base_url, use_proxy=False)
    assert (traj.steps[0].prompt_ids, traj.steps[0].response_ids) == ([1, 2], [3])


async def test_concurrent_trajectories_are_isolated(server: ModelServer) -> None:
    @trajectory(name="inner")
    async def inner(number: int) -> None:
        await client.chat.completions.create(model="m", messages=user(f"{number}b"))

    @trajectory(name="outer")
    async def outer(number: int) -> TrajectoryView:
        delay = {"sleep": (8 - number) / 100}  # the later one starts, the sooner it is answered
        await client.chat.completions.create(model="m", messages=user(f"{number}a"), extra_body=delay)
        return await inner(number)

    async with get_chat_client_async(base_url=server.base_url, api_key="EMPTY") as client:
        trajs = await asyncio.gather(*(asyncio.create_task(outer(number)) for number in range(8)))
    for number, traj in enumerate(trajs):
        assert [step.model_response for step in traj.steps] == [f"{number}a", f"{number}b"]
        assert [step.model_response for step in traj.result.steps] == [f"{number}b"]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<answer>3 + 9</answer>", 1.0),
        ("<answer>3 + 9 = 12</answer>", 1.0),
        ("<answer>3 * 9</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_answers_have_their_rewards(answer: str, reward: float) -> None:
    assert countdown_reward_fn(COUNTDOWN, answer).reward == reward


async def test_solvers_and_judge_have_their_own_tokens_and_rewards(roll_out: RollOut) -> None:
    episodes = await roll_out(run_workflow, SolverJudgeModel(), COUNTDOWN, n=3)
    for episode in episodes:
        assert [traj.name for traj in episode.trajectories] == ["solver", "solver", "judge"]
        *solvers, judge = episode.trajectories
        for solver in solvers:
            (text,) = answers_of(solver)
            assert parsed(text) == solver.result
            assert solver.reward == solver.steps[0].reward == float("3 + 9" in text)
        assert judge.result in [solver.result for solver in solvers]
        assert answers_of(judge)[0].startswith("<answer>")
        assert episode.is_correct is (judge.reward == 1.0)
    assembled = assemble(episodes, grpo.GRPO(), step=0, temperature=1.0)
    assert [credit.group_id for credit in assembled.credits] == ["t/solver", "t/solver", "t/judge"] * 3


async def test_trajectories_may_be_built_from_the_steps_of_sessions(roll_out: RollOut) -> None:
    (episode,) = await roll_out(run_workflow_by_sessions, SolverJudgeModel(), COUNTDOWN, n=1)
    assert len(episode.trajectories) == 3
    for traj in episode.trajectories:
        (text,) = answers_of(traj)
        assert traj.steps[0].action == Action(parsed(text))
        assert traj.final_reward() == traj.steps[0].reward == float("3 + 9" in text)


# Sessions, for calls from anywhere


async def test_calls_from_threads_and_pools_belong_to_the_rollout(roll_out: RollOut) -> None:
    def agent(question: str) -> float:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(generate_response, ["a", "b"]))
        thread = threading.Thread(target=generate_response, args=("c",))
        thread.start()
        thread.join()
        return 1.0

    episodes = await roll_out(agent, lambda messages: messages[-1]["content"], {"question": "?"}, n=3)
    assert [sorted(answers_of(episode.trajectories[0])) for episode in episodes] == [["a", "b", "c"]] * 3


PLAIN = """
import openai
client = openai.OpenAI()
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "from a child"}])
"""
WITH_SDK = """
from rllm.sdk import get_chat_client, session
with get_chat_client() as client, session(turn=1):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "from a child"}])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [pytest.param(PLAIN, id="plain"), pytest.param(WITH_SDK, id="sdk", marks=pytest.mark.slow)]
)
async def test_child_process_joins_the_trajectory_that_started_it(roll_out: RollOut, program: str) -> None:
    @trajectory(name="delegate")
    async def delegate() -> None:
        variables = {**os.environ, **environment()}
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=variables)
        assert await asyncio.wait_for(child.wait(), 60) == 0

    async def agent(question: str) -> list[TrajectoryView]:
        async with get_chat_client_async(base_url=PROXY, api_key="EMPTY") as client:
            asked = await trajectory(name="asker")(client.chat.completions.create)(model="m", messages=user("mine"))
        delegated = await delegate()
        asked.reward, delegated.reward = 0.0, 1.0
        return [asked, delegated]

    (episode,) = await roll_out(agent, lambda messages: messages[-1]["content"], {"question": "?"}, n=1)
    assert not episode.failed, episode.info
    assert [(traj.name, answers_of(traj)) for traj in episode.trajectories] == [
        ("asker", ["mine"]),
        ("delegate", ["from a child"]),
    ]


def test_search_answer_has_its_reward() -> None:
    reward = RewardSearchFn(RewardConfig())(RewardInput(task_info={"ground_truth": "Paris"}, action="Paris"))
    assert reward.reward == 1.0
