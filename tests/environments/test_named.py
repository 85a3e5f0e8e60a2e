"""Environments by name, with Gymnasium as the scheme that is installed in these tests."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from rllm.agents.chat_agent import TextAgent
from rllm.engine.signature import name_of
from rllm.environments import GymnasiumEnv, open_env
from rllm.environments.named import SCHEMES, Scheme
from rllm.errors import ConfigError, MissingDependencyError
from rllm.testing.gateway import scripted_gateway
from rllm.trainer.rollout_sources import FunctionSource, source_in


def test_name_yields_tasks_with_seeds_and_their_environment() -> None:
    opened = open_env("gymnasium:FrozenLake-v1?size=3&seed=5&render_mode=ansi&max_steps=7&is_slippery=false")
    assert [row["seed"] for row in opened.tasks] == [5, 6, 7]
    assert [row["id"] for row in opened.tasks] == ["FrozenLake-v1/5", "FrozenLake-v1/6", "FrozenLake-v1/7"]
    assert opened.env_class is GymnasiumEnv
    assert (opened.agent_class, opened.max_steps) == (TextAgent, 7)
    env = GymnasiumEnv.from_dict({**opened.tasks[0], **opened.env_args})
    observation, _ = env.reset()
    assert observation.startswith("\n[S]FFF")  # ansi: the option reached the environment
    observation, reward, done, info = env.step("2")
    assert "S[F]FF" in observation
    assert (reward, done, info["terminated"]) == (0.0, False, False)


def test_labels_are_the_legal_actions() -> None:
    opened = open_env("gymnasium:CartPole-v1?size=1&labels=left,right")
    env = GymnasiumEnv.from_dict({**opened.tasks[0], **opened.env_args})
    env.reset()
    assert env.step("I go right")[3]["num_invalid_actions"] == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "gymnasum:CartPole-v1",
            "unknown scheme 'gymnasum' (environments are SCHEME:NAME?key=value&...): did you mean 'gymnasium'?",
        ),
        (
            "CartPole-v1",
            "unknown scheme 'CartPole-v1' (environments are SCHEME:NAME?key=value&...): use one of file, gymnasium,",
        ),
        ("gymnasium:", "the name is missing"),
        ("gymnasium:CartPole-v1?size", "'size' is not a list of parameters: use key=value"),
        ("gymnasium:CartPole-v1?size=0", "size=0: use a whole number of at least 1"),
        ("gymnasium:CartPole-v1?size=2&size=3", "the parameter 'size' is given twice"),
        ("gymnasium:CartPole-v1?labels=left", "pass one label for each action"),
        ("gymnasium:NoSuchGame-v0", "NoSuchGame"),
        ("gymnasium:FrozenLake-v1?slippery=false", "unexpected keyword argument 'slippery'"),
    ],
)
def test_unknown_name_error_lists_the_known_ones(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_env(spec)
    assert message in str(raised.value)
    assert spec in str(raised.value)


def test_function_in_an_environment_may_take_the_base_url() -> None:
    def walk(env: GymnasiumEnv, base_url: str, **task: Any) -> float:
        observed, _ = env.reset()
        with OpenAI(base_url=base_url, api_key="none") as client:
            asked: Any = [{"role": "user", "content": observed}]
            answer = client.chat.completions.create(model="policy", messages=asked)
        return env.step(answer.choices[0].message.content)[1] or float(task["seed"])

    named = open_env("gymnasium:FrozenLake-v1?size=1&seed=7&is_slippery=false")
    source = source_in(named, agent_run_func=walk)
    source.check(named.tasks)
    assert isinstance(source, FunctionSource)
    assert name_of(source.agent_run_func).endswith("walk")
    with scripted_gateway(lambda messages: "2") as gateway:
        assert gateway.rollout(source.agent_run_func, named.tasks[0]).trajectories[0].reward == 7.0


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "other", Scheme("no_module:open_env", "", "no_such_package", "other-extra"))
    with pytest.raises(MissingDependencyError, match=r"no_such_package.*rllm\[other-extra\]"):
        open_env("other:name")
