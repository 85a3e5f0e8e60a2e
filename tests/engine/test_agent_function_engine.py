from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import aiohttp
import openai
import pytest
from starlette.applications import Starlette

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.join import complete
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.errors import ConfigError, InferenceError
from rllm.gateway.server import GatewayServer, ServerThread
from rllm.gateway.upstream import EngineUpstream, UpstreamCall
from rllm.sdk import get_chat_client, get_chat_client_async, trajectory
from rllm.store.memory import MemoryTraceStore
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.types import REFERENCE_KEY, Episode, Step, TerminationReason, Trace, Trajectory

Engine = Callable[..., AgentFunctionEngine]


def shout(messages: list[dict[str, Any]]) -> str:
    text: str = messages[-1]["content"]
    return text.upper()


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine(shout)


@pytest.fixture
def store() -> MemoryTraceStore:
    return MemoryTraceStore()


@pytest.fixture
def gateway(
    scripted: ScriptedEngine, store: MemoryTraceStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GatewayServer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with GatewayServer(store, EngineUpstream(scripted, "policy")) as gateway:
        yield gateway


@pytest.fixture
def engine_of(gateway: GatewayServer, store: MemoryTraceStore) -> Engine:
    def engine_of(function: Callable[..., Any]) -> AgentFunctionEngine:
        return AgentFunctionEngine(function, gateway=gateway, store=store)

    return engine_of


async def run(engine: AgentFunctionEngine, *tasks: dict[str, Any], **settings: Any) -> list[Episode]:
    trainable = settings.pop("trainable", True)
    sampling = settings.pop("sampling", {})
    on_episode = settings.pop("on_episode", None)
    attempts = [
        RolloutRequest(task=task, task_id=f"t:{number}", trainable=trainable, sampling=sampling)
        for number, task in enumerate(tasks)
    ]
    with engine:
        return await RolloutRunner(engine, retry_delay_s=0, **settings).run(attempts, on_episode=on_episode)


def ask(client: Any, text: str, **options: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}], **options)


class DistantStore(MemoryTraceStore):
    """Store that claims to be remote, and records the threads that read it."""

    is_local = False

    def __init__(self) -> None:
        super().__init__()
        self.readers: set[threading.Thread] = set()

    def by_session(self, session_id: str) -> list[Trace]:
        self.readers.add(threading.current_thread())
        return super().by_session(session_id)


def texts_of(steps: list[Step]) -> list[str]:
    """Return the text of the steps' tokens."""
    return [decode(step.response_ids) for step in steps]


def problem(episode: Episode) -> str:
    message: str = episode.info["error"]["message"]
    return message


# Accepted functions and return values


async def test_invalid_episode_fails_alone(engine_of: Engine) -> None:
    odd = {
        "trajectories": Episode(trajectories=[{"reward": 1.0}]),  # type: ignore[list-item]
        "steps": Trajectory(trainable=False, steps=[{}]),  # type: ignore[list-item]
        "metrics": Episode(trajectories=[Trajectory(trainable=False)], metrics={"note": "slow"}),  # type: ignore[dict-item]
        "info": Episode(trajectories=[Trajectory(trainable=False)], info={"error": "the browser died"}),
        "sound": Trajectory(trainable=False, reward=1.0),
    }
    episodes = await run(engine_of(lambda text: odd[text]), *({"text": name} for name in odd))
    assert [episode.failed for episode in episodes] == [True, True, True, True, False]
    assert "the metric 'note' 'slow': use a finite number" in problem(episodes[2])
    assert "the browser died" in problem(episodes[3])


def plain_agent(text: str) -> float:
    """Call the model without importing rllm."""
    with openai.OpenAI() as client:
        return float(ask(client, text).choices[0].message.content == "YES")


async def plain_async_agent(text: str) -> float:
    async with openai.AsyncOpenAI() as client:
        return float((await ask(client, text)).choices[0].message.content == "YES")


class CallableAgent:
    async def __call__(self, text: str) -> float:
        return await plain_async_agent(text)


def agent_given_a_url(text: str, base_url: str) -> float:
    with openai.OpenAI(base_url=base_url, api_key="x") as client:
        ask(client, text)
    return 1.0


def sdk_agent(text: str) -> float:
    with get_chat_client(base_url="http://127.0.0.1:9/v1") as client:
        ask(client, text)
    return 1.0


async def streaming_agent(text: str) -> float:
    async with get_chat_client_async() as client:
        async for _ in await ask(client, text, stream=True):
            pass
    return 1.0


@pytest.mark.parametrize(
    "agent", [plain_agent, plain_async_agent, CallableAgent(), agent_given_a_url, sdk_agent, streaming_agent]
)
async def test_reward_is_joined_with_the_exact_tokens(engine_of: Engine, scripted: ScriptedEngine, agent: Any) -> None:
    (episode,) = await run(engine_of(agent), {"text": "yes"})
    assert episode.info == {}
    (one,) = episode.trajectories
    (step,) = one.steps
    (output,) = scripted.outputs
    assert (one.name, one.reward, episode.is_correct) == ("agent", 1.0, True)
    assert step.prompt_ids == output.prompt_ids
    assert step.response_ids == output.completion_ids
    assert step.logprobs == output.logprobs
    assert (episode.id, episode.task_id, episode.index) == ("t:0:0", "t:0", 0)
    assert episode.task == one.task == {"text": "yes"}
    assert episode.metrics["rollout/num_calls"] == 1


async def test_turns_are_in_call_order(engine_of: Engine) -> None:
    def agent(text: str) -> float:
        with openai.OpenAI() as client:
            for turn in range(3):
                ask(client, f"{text} {turn}")
        return 1.0

    (episode,) = await run(engine_of(agent), {"text": "turn"})
    assert texts_of(episode.trajectories[0].steps) == ["TURN 0", "TURN 1", "TURN 2"]


async def test_none_is_recorded_and_counted_as_unscored(engine_of: Engine) -> None:
    def agent(text: str) -> None:
        plain_agent(text)

    (episode,) = await run(engine_of(agent), {"text": "x"})
    assert not episode.failed
    assert "'agent'" in episode.info["unscored"]
    assert episode.trajectories[0].final_reward() is None
    assert texts_of(episode.trajectories[0].steps) == ["X"]


async def test_agent_may_return_a_whole_episode(engine_of: Engine) -> None:
    def agent(text: str) -> Episode:
        plain_agent(text)
        return Episode(id="mine", is_correct=True, trajectories=[Trajectory(name="me", reward=0.5)], metrics={"m": 2.0})

    (episode,) = await run(engine_of(agent), {"text": "x"})
    assert (episode.id, episode.is_correct, episode.metrics["m"]) == ("t:0:0", True, 2.0)
    assert texts_of(episode.trajectories[0].steps) == ["X"]


# Assignment of tokens


async def test_parallel_solvers_and_a_judge_have_their_own_tokens(
    gateway: GatewayServer, store: MemoryTraceStore, engine_of: Engine
) -> None:
    client = get_chat_client_async()

    @trajectory(name="solver")
    async def solve(number: int) -> str:
        answer = await ask(client, f"solver {number}")
        text: str = answer.choices[0].message.content
        return text

    @trajectory(name="judge")
    async def judge(answers: list[str]) -> None:
        await ask(client, "judge " + ",".join(answers))

    async def flow(n: int) -> list[Trajectory]:
        solved = await asyncio.gather(*(solve(number) for number in range(n)))
        for number, one in enumerate(solved):
            one.steps[0].reward = float(number)
        judged = await judge([one.result for one in solved])
        judged.reward = 1.0
        return [*reversed(solved), judged]

    async with client:
        (episode,) = await run(engine_of(flow), {"n": 4})
    *solvers, judged = episode.trajectories
    for one in solvers:
        assert texts_of(one.steps) == [f"SOLVER {int(one.final_reward() or 0)}"]
        assert one.input == {"number": int(one.final_reward() or 0)}
    assert texts_of(judged.steps) == ["JUDGE SOLVER 0,SOLVER 1,SOLVER 2,SOLVER 3"]


@pytest.mark.slow
async def test_64_concurrent_agents_with_one_shared_client_keep_their_rewards(
    gateway: GatewayServer, store: MemoryTraceStore
) -> None:
    latency = random.Random(0)
    scripted = ScriptedEngine(shout, latency_s=lambda _: latency.random() / 20)
    with (
        GatewayServer(store, EngineUpstream(scripted, "policy")) as slow,
        openai.OpenAI(base_url=f"{slow.url}/v1", api_key="shared") as client,
    ):

        def agent(number: int) -> float:
            with ThreadPoolExecutor(2) as executor:  # as frameworks do
                first = executor.submit(ask, client, f"{number} first").result()
            last = ask(client, f"{number} last")
            assert first.choices[0].message.content == f"{number} FIRST"
            assert last.choices[0].message.content == f"{number} LAST"
            return number

        engine = AgentFunctionEngine(agent, gateway=slow, store=store)
        episodes = await run(engine, *({"number": number} for number in range(128)), max_concurrent=64)
    for number, episode in enumerate(episodes):
        assert episode.info == {}
        assert episode.trajectories[0].reward == number
        assert texts_of(episode.trajectories[0].steps) == [f"{number} FIRST", f"{number} LAST"]


async def test_several_trajectories_without_steps_are_rejected(engine_of: Engine) -> None:
    def agent(text: str) -> list[Trajectory]:
        plain_agent(text)
        return [Trajectory(name="solver", reward=1.0), Trajectory(name="judge", reward=0.0)]

    (episode,) = await run(engine_of(agent), {"text": "x"})
    assert episode.info["error"]["type"] == "AgentError"
    assert "'solver' has no steps" in problem(episode)
    assert "@trajectory" in problem(episode)


async def test_calls_recorded_only_by_the_gateway_are_assigned_to_their_trajectory(engine_of: Engine) -> None:
    """aiohttp's answers are not recorded in our process, so the steps come from the stamps that the gateway stored."""

    @trajectory(name="quiet")
    async def quiet(text: str) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        async with (
            aiohttp.ClientSession() as client,
            client.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body) as response,
        ):
            assert response.status == 200

    async def agent(text: str) -> list[Trajectory]:
        both = await asyncio.gather(quiet(f"{text} 1"), quiet(f"{text} 2"))
        return list(both)

    (episode,) = await run(engine_of(agent), {"text": "x"})
    assert [texts_of(one.steps) for one in episode.trajectories] == [["X 1"], ["X 2"]]


@pytest.mark.parametrize("keeps", [["one", "x", "two"], ["one", "x"], ["x", "two"]])
async def test_trajectory_contains_calls_of_all_formats_in_order(engine_of: Engine, keeps: list[str]) -> None:
    """Only chats are recorded in our process; a step that its author removes stays removed."""

    @trajectory(name="solver")
    def solve(text: str) -> None:
        with openai.OpenAI() as client:
            ask(client, "one")
            client.responses.create(model="policy", input=text)
            ask(client, "two")

    def agent(text: str) -> list[Trajectory]:
        solved, other = solve(text), solve("y")
        solved.steps = [step for step in solved.steps if step.model_response.lower() in keeps]
        other.steps.clear()
        solved.reward = other.reward = 1.0
        return [solved, other]

    (episode,) = await run(engine_of(agent), {"text": "x"})
    assert texts_of(episode.trajectories[0].steps) == [text.upper() for text in keeps]
    assert texts_of(episode.trajectories[1].steps) == ["ONE", "Y", "TWO"], (
        "a trajectory without steps gets all of its calls"
    )


async def test_steps_before_an_exception_stay_in_the_record(engine_of: Engine) -> None:
    @trajectory(name="solver")
    def solve(text: str) -> None:
        with openai.OpenAI() as client:
            ask(client, text)

    def agent(text: str) -> float:
        solve(text)
        raise RuntimeError("the judge is gone")

    (episode,) = await run(engine_of(agent), {"text": "x"})
    assert "the judge is gone" in problem(episode)
    (done,) = episode.trajectories
    assert (done.name, [step.model_response for step in done.steps]) == ("solver", ["X"])


async def test_step_of_another_server_is_an_error_if_trained_on(
    engine_of: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.engine.capture.LATE_TRACE_S", 0.0)  # none is missing: the answered call has been captured

    def agent(text: str, trainable: bool) -> list[Trajectory]:
        with openai.OpenAI() as client:
            mine = Step(id=ask(client, text).id)
        theirs = Trajectory(name="judge", steps=[Step(id="elsewhere")], trainable=trainable, reward=1.0)
        return [Trajectory(name="solver", steps=[mine], reward=1.0), theirs]

    bad, good = await run(engine_of(agent), {"text": "x", "trainable": True}, {"text": "x", "trainable": False})
    assert "'judge': its step 'elsewhere'" in problem(bad)
    assert bad.info["error"]["type"] == "CaptureError"
    assert texts_of(good.trajectories[0].steps) == ["X"]


async def test_failed_call_is_left_out_and_its_retry_is_kept(gateway: GatewayServer, store: MemoryTraceStore) -> None:
    scripted = ScriptedEngine([InferenceError("busy", status_code=503), "fine"])

    def agent(text: str) -> float:
        with openai.OpenAI(max_retries=2) as client:
            ask(client, text)
        return 1.0

    with GatewayServer(store, EngineUpstream(scripted, "policy")) as flaky:
        (episode,) = await run(AgentFunctionEngine(agent, gateway=flaky, store=store), {"text": "x"})
    assert texts_of(episode.trajectories[0].steps) == ["fine"]
    assert episode.trajectories[0].info["num_unusable_calls"] == 1


async def test_abandoned_stream_is_not_trained_on(engine_of: Engine) -> None:
    @trajectory(name="impatient")
    def impatient(text: str) -> None:
        with openai.OpenAI() as client:
            with ask(client, text * 1000, stream=True) as stream:
                next(iter(stream))
            ask(client, text)

    (episode,) = await run(engine_of(lambda text: impatient(text)), {"text": "x"})
    assert texts_of(episode.trajectories[0].steps)[-1] == "X"


async def test_reference_rollouts_are_distinguished_from_untrainable_trajectories() -> None:
    def outcome_of(*trainable: bool, **of_attempt: Any) -> list[bool]:
        episode = Episode(trajectories=[Trajectory(reward=1.0, trainable=one, steps=[Step()]) for one in trainable])
        complete(episode, RolloutRequest(task={}, task_id="t", **of_attempt), [])
        assert not any(path.trainable for path in episode.trajectories)
        return [REFERENCE_KEY in path.info for path in episode.trajectories]

    assert outcome_of(True, False, trainable=False) == [True, False]
    assert outcome_of(True, trainable=False, split="eval") == [False]
    assert outcome_of(False) == [False]


async def test_validation_keeps_the_reward_and_trains_nothing(engine_of: Engine) -> None:
    (episode,) = await run(engine_of(plain_agent), {"text": "yes"}, trainable=False)
    assert episode.is_correct
    assert [one.trainable for one in episode.trajectories] == [False]


# Failures and their messages


async def test_agent_exception_does_not_affect_siblings(engine_of: Engine) -> None:
    def agent(number: int) -> float:
        plain_agent("x")
        return 1 / number

    bad, good = await run(engine_of(agent), {"number": 0}, {"number": 1})
    assert bad.termination_reason is TerminationReason.ERROR
    assert "agent raised ZeroDivisionError: division by zero" in problem(bad)
    assert "return 1 / number" in bad.info["error"]["traceback"]
    assert bad.session_id
    assert not good.failed


async def test_missing_reward_is_reported_at_once_and_only_once(
    engine_of: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def agent(text: str) -> Any:
        plain_agent(text)
        return text

    episodes = await run(engine_of(agent), {"text": "figs"}, {"text": "figs"})
    [found] = [record.getMessage() for record in caplog.records if record.name.startswith("rllm.")]
    assert "agent returned 'figs'" in found
    assert [problem(one) for one in episodes] == [found, found]


@pytest.mark.parametrize("code", ["exit", "async exit"])
async def test_agent_that_exits_ends_only_its_rollout(engine_of: Engine, code: str) -> None:
    def agent() -> None:
        sys.exit(3)

    async def async_agent() -> None:
        sys.exit(3)

    (episode,) = await run(engine_of(async_agent if code == "async exit" else agent), {})
    assert "sys.exit(3)" in problem(episode)


async def test_agent_without_calls_gets_an_error_with_the_remedy(engine_of: Engine, gateway: GatewayServer) -> None:
    (episode,) = await run(engine_of(lambda text: 1.0), {"text": "x"})
    assert episode.info["error"]["type"] == "CaptureError"
    assert "OPENAI_BASE_URL" in problem(episode)
    assert f"{gateway.url}/v1" in problem(episode)
    assert gateway.session_url(episode.session_id) in problem(episode)


async def test_agent_with_rejected_calls_gets_an_error_with_the_reason(engine_of: Engine) -> None:
    def agent(text: str) -> float:
        try:
            ask(get_chat_client(), text, extra_body={"temperature": "hot"})
        except openai.BadRequestError:
            return 0.0
        return 1.0

    (episode,) = await run(engine_of(agent), {"text": "x"})
    assert episode.info["error"]["type"] == "CaptureError"
    assert "none of its 1 calls has usable tokens: temperature='hot'" in problem(episode)


async def test_error_names_the_imported_framework(engine_of: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_index", ModuleType("llama_index"))
    (episode,) = await run(engine_of(lambda text: 1.0), {"text": "x"})
    assert "LlamaIndex reads OPENAI_API_BASE" in problem(episode)
    assert "CrewAI" not in problem(episode)


async def test_agent_may_declare_that_it_makes_no_calls(engine_of: Engine) -> None:
    def agent(text: str) -> Trajectory:
        return Trajectory(reward=1.0, trainable=False)

    (episode,) = await run(engine_of(agent), {"text": "x"})
    assert not episode.failed
    assert episode.trajectories[0].reward == 1.0
    assert episode.metrics["rollout/num_calls"] == 0


async def test_error_names_another_server_that_failed(engine_of: Engine) -> None:
    with ServerThread(Starlette()) as other:

        def agent(text: str) -> float:
            with openai.OpenAI(base_url=f"{other.url}/v1", api_key="k") as client:
                ask(client, text)
            return 1.0

        (episode,) = await run(engine_of(agent), {"text": "x"})
    assert episode.info["error"]["type"] == "CaptureError"
    assert f"it called {other.url}/v1/chat/completions" in problem(episode)
    assert "raised NotFoundError" in problem(episode)


async def test_error_names_another_server_that_answered(engine_of: Engine, store: MemoryTraceStore) -> None:
    with GatewayServer(store, EngineUpstream(ScriptedEngine(["elsewhere"]), "policy")) as other:

        def agent(text: str) -> float:
            with openai.OpenAI(base_url=f"{other.url}/v1", api_key="k") as client:
                ask(client, text)
            return 1.0

        (episode,) = await run(engine_of(agent), {"text": "x"})
    assert f"it called {other.url}/v1/chat/completions" in problem(episode)


async def test_error_quotes_why_calls_have_no_tokens(store: MemoryTraceStore) -> None:
    class Tokenless(EngineUpstream):
        async def complete(self, call: UpstreamCall) -> dict[str, Any]:
            answer = await super().complete(call)
            del answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]
            return answer

    with GatewayServer(store, Tokenless(ScriptedEngine(shout), "policy")) as gateway:
        engine = AgentFunctionEngine(plain_agent, gateway=gateway, store=store)
        (bad,) = await run(engine, {"text": "x"})
        (good,) = await run(engine, {"text": "yes"}, trainable=False)
    assert bad.info["error"]["type"] == "CaptureError"
    assert "none of its 1 calls has usable tokens: " in problem(bad)
    assert "token_ids" in problem(bad)
    assert good.is_correct


async def test_server_failure_is_retried_in_a_new_session(store: MemoryTraceStore) -> None:
    scripted = ScriptedEngine([InferenceError("down", status_code=500), "ok"])

    def agent(text: str) -> float:
        with openai.OpenAI(max_retries=0) as client:
            ask(client, text)
        return 1.0

    with GatewayServer(store, EngineUpstream(scripted, "policy")) as gateway:
        (episode,) = await run(AgentFunctionEngine(agent, gateway=gateway, store=store), {"text": "x"})
    assert not episode.failed
    assert texts_of(episode.trajectories[0].steps) == ["ok"]
    assert len(store.sessions()) == 2


async def test_stuck_agent_is_cancelled_at_its_deadline_with_its_stack(engine_of: Engine, pass_time: Any) -> None:
    hanging, release, ended = threading.Event(), threading.Event(), asyncio.Event()

    def agent(stuck: bool) -> float:
        plain_agent("x")
        if stuck:
            hanging.set()
            release.wait()
        return 1.0

    tasks = {"stuck": True}, {"stuck": False}
    running = asyncio.create_task(run(engine_of(agent), *tasks, timeout_s=600, on_episode=lambda episode: ended.set()))
    await ended.wait()
    assert await asyncio.to_thread(hanging.wait, 60)
    pass_time(600)
    bad, good = await running
    release.set()
    assert bad.termination_reason is TerminationReason.TIMEOUT
    assert "release.wait()" in bad.info["error"]["traceback"]
    assert not good.failed


async def test_sampling_of_the_attempt_overrides_that_of_the_agent(engine_of: Engine, store: MemoryTraceStore) -> None:
    def agent(text: str) -> float:
        with openai.OpenAI() as client:
            ask(client, text, temperature=0.1)
        return 1.0

    (episode,) = await run(engine_of(agent), {"text": "x"}, sampling={"temperature": 0.7, "max_tokens": 100})
    (trace,) = store.by_session(episode.session_id)
    assert (trace.sampling["temperature"], trace.sampling["max_tokens"]) == (0.7, 100)
    assert trace.requested_sampling["temperature"] == 0.1
    info = store.session(episode.session_id)
    assert info is not None
    assert (info.metadata["task_id"], info.metadata["index"], info.metadata["split"]) == ("t:0", 0, "train")


async def test_columns_named_like_parameters_are_passed(engine_of: Engine) -> None:
    def agent(**task: Any) -> float:
        plain_agent("x")
        return float(sum(task.values()))

    names = ("self", "function", "task", "attempt", "name", "session", "metadata", "func", "kwargs")
    (episode,) = await run(engine_of(agent), dict.fromkeys(names, 1))
    assert episode.trajectories[0].reward == len(names)


# Environment of the process


def test_environment_variables_are_restored(
    engine_of: Engine, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "mine")
    before = dict(os.environ)
    with engine_of(plain_agent):
        assert os.environ["OPENAI_BASE_URL"] == f"{gateway.url}/v1"
        assert os.environ["OPENAI_API_KEY"]
        assert os.environ["ANTHROPIC_API_KEY"] == "mine"
    assert dict(os.environ) == before


def test_overlapping_engines_restore_the_remaining_address(
    engine_of: Engine, gateway: GatewayServer, store: MemoryTraceStore, scripted: ScriptedEngine
) -> None:
    before = dict(os.environ)
    with GatewayServer(MemoryTraceStore(), EngineUpstream(scripted, "policy")) as other:
        first = engine_of(plain_agent).__enter__()
        second = AgentFunctionEngine(plain_agent, gateway=other, store=store).__enter__()
        assert os.environ["OPENAI_BASE_URL"] == f"{other.url}/v1"
        first.__exit__()
        assert os.environ["OPENAI_BASE_URL"] == f"{other.url}/v1"
        second.__exit__()
    assert dict(os.environ) == before


async def test_engine_must_be_started(engine_of: Engine) -> None:
    with pytest.raises(ConfigError, match="with engine:"):
        await engine_of(plain_agent).rollout(RolloutRequest(task={}, task_id="t"))


def test_non_function_is_rejected(engine_of: Engine) -> None:
    with pytest.raises(ConfigError, match=r"agent_run_func='f\.py:agent'"):
        engine_of("f.py:agent")  # type: ignore[arg-type]


async def test_sync_agent_does_not_block_the_loop(engine_of: Engine) -> None:
    began, turned = threading.Event(), threading.Event()

    async def turn() -> None:
        while not began.is_set():  # noqa: ASYNC110  # the agent is not of this loop
            await asyncio.sleep(0.001)
        turned.set()

    def agent() -> float:
        plain_agent("x")
        began.set()
        assert turned.wait(60)
        return 1.0

    turning = asyncio.create_task(turn())
    (episode,) = await run(engine_of(agent), {})
    await turning
    assert not episode.failed


async def test_event_loop_does_not_wait_for_a_remote_store(scripted: ScriptedEngine) -> None:
    store = DistantStore()

    def agent(question: str, base_url: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key="none") as client:
            ask(client, question)
        return 1.0

    with GatewayServer(store, EngineUpstream(scripted, "policy")) as gateway:
        [episode] = await run(AgentFunctionEngine(agent, gateway=gateway, store=store), {"question": "hi"})
    assert texts_of(episode.trajectories[0].steps) == ["HI"]
    assert store.readers
    assert threading.current_thread() not in store.readers
