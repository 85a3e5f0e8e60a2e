from __future__ import annotations

import subprocess
import sys

import pytest
import rllm.sdk.protocol
import rllm.sdk.shortcuts

import rllm.sdk
import rllm.sdk.client
import rllm.sdk.context
from rllm.types import Step, Trajectory

HEAVY = {"torch", "starlette", "uvicorn", "ray", "transformers", "aiohttp", "numpy", "orjson", "yaml", "rich", "typer"}


def modules_after(program: str, but: str = "set()") -> set[str]:
    program += f"; import sys; print(*(set(sys.modules) - {but}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    assert not modules_after("import rllm.sdk") & (HEAVY | {"openai", "httpx", "httpx2", "pydantic"})


@pytest.mark.slow
def test_client_loads_openai_and_nothing_heavier() -> None:
    program = "import openai, sys; known = set(sys.modules); import rllm.sdk; rllm.sdk.get_chat_client()"
    assert not modules_after(program, but="known") & HEAVY


def test_modules_are_not_named_like_exported_functions() -> None:
    # Importing such a module would put it in the place of the function.
    assert rllm.sdk.session is rllm.sdk.context.session
    assert rllm.sdk.trajectory is rllm.sdk.context.trajectory


def test_every_exported_name_exists() -> None:
    for name in rllm.sdk.__all__:
        assert getattr(rllm.sdk, name) is not None


def test_published_names_are_exported() -> None:
    assert rllm.sdk.TrajectoryView is rllm.sdk.protocol.TrajectoryView is Trajectory
    assert rllm.sdk.StepView is rllm.sdk.protocol.StepView is Step
    assert rllm.sdk.SessionContext is rllm.sdk.ContextVarSession is rllm.sdk.Session
    assert rllm.sdk.shortcuts.get_chat_client is rllm.sdk.get_chat_client is rllm.sdk.client.get_chat_client
