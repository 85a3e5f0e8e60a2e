import contextlib
import functools
import gc
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rllm import cli
from rllm.demo import tasks
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy

cli.get_command = functools.cache(cli.get_command)  # cached: it takes longer than most tests
SMALL = TinyPolicyRecipe(
    hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=400, skill_steps=2, habit_steps=1, batch_size=2
)
AGENT = """
from openai import OpenAI

client = OpenAI()


def agent(question, answer):
    messages = [{"role": "user", "content": question}]
    response = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    return float(len(response.choices[0].message.content or "") % 2)
"""


@pytest.fixture(scope="session")
def policy(policies):
    """Model that generates arbitrary text; it is built in a second."""
    speech = functools.partial(tasks.conversations, tasks.CAREFUL, system="Answer.")
    return tiny_policy(
        lambda seed: speech(seed=seed),
        lambda seed: speech(seed=seed),
        recipe=SMALL,
        cache_dir=policies,
    )


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A user's folder with an agent and its tasks; the current directory."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    rows = [{"question": f"How many {item}?", "answer": "4"} for item in ("figs", "limes")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def fails(monkeypatch, capsys):
    """Run a command that must fail; return its exit code and its output on stderr, without the line about the model."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rllm", *arguments])
        with as_a_program(), pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, re.sub(r"^loading .* \.\.\.\n", "", capsys.readouterr().err)

    return run


@contextlib.contextmanager
def as_a_program():
    """Restore the environment and the interpreter's settings afterwards, and remove modules of the current directory
    from `sys.modules`: other tests use some of the same names."""
    path, modules, environment = list(sys.path), dict(sys.modules), dict(os.environ)
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        sys.path[:] = path
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for name in [name for name, module in sys.modules.items() if modules.get(name) is not module]:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(Path.cwd()):
                del sys.modules[name]


def here(*arguments, cwd):
    """Run a command like `rllm`, in this process, which saves the imports."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    command = ["rllm", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", command)
        with as_a_program(), pytest.raises(SystemExit) as ended:
            cli.main()
    return subprocess.CompletedProcess(
        command, ended.value.code or 0, *(stream.buffer.getvalue().decode() for stream in (out, err))
    )


def rllm(*arguments, cwd, timeout=300, env=None):
    command = [sys.executable, "-m", "rllm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env, check=False)
