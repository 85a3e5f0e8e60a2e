"""Histories that are compacted, cut and delegated, in the fast suite: their sequences in the trainer, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rllm.engine.join import complete
from rllm.engine.request import RolloutRequest
from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.store.memory import MemoryTraceStore
from rllm.types import NUM_SIDE_CALLS_KEY, Episode, Trajectory

from .forced_engine import ForcedEngine
from .proof import check_trained_once
from .rollouts import num_sequences_of

Ask = Callable[..., str]
SYSTEM = {"role": "system", "content": "You fix bugs."}
SUMMARY = "The user wants the bug fixed.\nIt is in reader.py, line 7.\nA failing test exists.\nNext: change that line."


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def summary_in_the_conversation(ask: Ask) -> None:
    """Summarize like Claude Code: with the same tools, and a last user message that asks for the summary."""
    messages = [SYSTEM, user("Fix the bug.")]
    messages += [assistant(ask(messages)), user("FileNotFoundError")]
    summary = ask([*messages[:2], messages[2], user("Summarize the conversation.")])
    ask([SYSTEM, user(f"This session continues an earlier one.\nSummary: {summary}\nContinue.")])


def summary_without_tools(ask: Ask) -> None:
    """Summarize like Codex and OpenCode: in a separate call, whose answer returns in a user message."""
    messages = [SYSTEM, user("Fix the bug.")]
    messages += [assistant(ask(messages)), user("FileNotFoundError")]
    ask(messages)
    summary = ask([user(f"<conversation>{messages}</conversation> Summarize it.")], tools=[])
    messages = [SYSTEM, user("Fix the bug."), user(f"Another model has begun; its summary:\n{summary}")]
    messages += [assistant(ask(messages)), user("Go on.")]
    ask(messages)


def summary_as_tags(ask: Ask) -> None:
    """Read the lines of the summary, and write each into its own tag, in the system message."""
    messages = [SYSTEM, user("Fix the bug.")]
    ask(messages)
    lines = ask([user(f"Extract the context of {messages}. Summarize it.")], tools=[]).splitlines()
    memory = "".join(f'<item number="{n}">{line}</item>' for n, line in enumerate(lines))
    ask([{"role": "system", "content": f"You fix bugs. <memory>{memory}</memory>"}, user("Continue.")])


def sliding_window(ask: Ask) -> None:
    """Cut off the oldest messages, without a summary."""
    messages = [SYSTEM, user("Fix the bug.")]
    for _ in range(4):
        messages = [*messages, assistant(ask(messages)), user("And now?")]
        messages = [messages[0], *messages[-3:]]


def sub_agents(ask: Ask) -> None:
    """Delegate to an agent with tools and, in turns, to one without; both report to the agent that started them."""
    messages = [SYSTEM, user("Fix the bug.")]
    messages += [assistant(ask(messages))]
    looking = [user("Look for the reader.")]
    looking += [assistant(ask(looking)), user("reader.py")]
    plan = ask([user("Make a plan.")], tools=[])
    found = ask(looking)
    ask([*messages, user(f"The sub-agents report:\n{found}\n{plan}")])


def fork(ask: Ask) -> None:
    """Continue one answer by two attempts."""
    messages = [SYSTEM, user("Fix the bug.")]
    messages += [assistant(ask(messages))]
    for way in ("by hand", "by a tool"):
        ask([*messages, user(f"Do it {way}.")])


@pytest.mark.parametrize(
    ("agent", "num_calls", "num_segments"),
    [
        (summary_in_the_conversation, 3, 2),
        (summary_without_tools, 5, 3),
        pytest.param(summary_as_tags, 3, 3, marks=pytest.mark.slow),
        pytest.param(sliding_window, 4, 3, marks=pytest.mark.slow),
        (sub_agents, 5, 3),
        pytest.param(fork, 3, 2, marks=pytest.mark.slow),
    ],
)
def test_every_sampled_token_is_trained_once(
    engine: ForcedEngine, agent: Callable[[Ask], None], num_calls: int, num_segments: int
) -> None:
    sampled = 0

    def script(prompt: str) -> str:
        nonlocal sampled
        sampled += 1
        return (
            SUMMARY if "Summarize" in prompt[-200:] else f"<think>\nHm.\n</think>\n\nStep {sampled} is to look at it."
        )

    engine.script = script
    store = MemoryTraceStore()
    with GatewayServer(store, EngineUpstream(engine, "m"), GatewayConfig(shutdown_timeout_s=1.0)) as server:
        tool = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}

        def ask(messages: list[Any], tools: list[Any] | None = None) -> str:
            body = {"model": "m", "messages": messages, "tools": [tool] if tools is None else tools}
            answer = httpx.post(f"{server.session_url('s')}/chat/completions", json=body, timeout=60).json()
            return str(answer["choices"][0]["message"]["content"])

        agent(ask)
        ask([user("Is this a new topic?")], tools=[])
    traces = store.by_session("s")
    *turns, title = traces
    episode = Episode(task_id="t", trajectories=[Trajectory(name="agent")])
    episode = complete(episode, RolloutRequest(task={}, task_id="t", session_id="s"), traces, seen=[])
    assert episode.trajectories[0].info[NUM_SIDE_CALLS_KEY] == 1, "no later call uses the topic"
    assert title.id not in {step.id for step in episode.trajectories[0].steps}
    assert (len(turns), num_sequences_of(turns)) == (num_calls, num_segments)
    check_trained_once(episode, turns)
