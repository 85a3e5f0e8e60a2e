from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from rllm.errors import AgentError, CaptureError
from rllm.testing import scripted_gateway
from rllm.testing.scripted import encode

DOCS = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()


@pytest.mark.slow
def test_programs_of_the_testing_page_run(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    for number, program in enumerate(programs):
        (tmp_path / f"test_{number}.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{DOCS.count('def test_')} passed" in done.stdout


async def test_async_agent_can_be_rolled_out_in_an_async_test() -> None:
    async def agent(text: str) -> float:
        async with AsyncOpenAI() as client:
            await client.responses.create(model="m", input=text)
        return 0.5

    with scripted_gateway(["ok"]) as gateway:
        episode = await gateway.rollout_async(agent, {"text": "hi"})
    assert episode.trajectories[0].reward == 0.5
    assert episode.trajectories[0].steps[0].response_ids[:-1] == encode("ok")


def test_failing_agent_fails_its_test() -> None:
    def raises() -> None:
        raise KeyError("x")

    with scripted_gateway(["ok"]) as gateway:
        with pytest.raises(AgentError, match="raised KeyError"):
            gateway.rollout(raises)
        with pytest.raises(CaptureError, match="OPENAI_BASE_URL"):
            gateway.rollout(lambda: 1.0)


def test_sessions_are_separate_and_may_have_their_own_sampling() -> None:
    with scripted_gateway(["a long answer"]) as gateway:
        url = gateway.open_session("other", sampling={"max_tokens": 3})
        httpx.post(f"{url}/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "x"}]})
        assert gateway.traces() == []
        assert gateway.traces("other")[0].response_ids == encode("a l")
        assert gateway.environment(url)["ANTHROPIC_BASE_URL"] == f"{gateway.url}/sessions/other"
