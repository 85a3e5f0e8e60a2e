"""The run with older clients really uses them: `PYTHONPATH=.clients RLLM_CLIENTS=.clients pytest ...`."""

import os
from pathlib import Path

import anthropic
import openai

REQUIRED = dict(
    line.split("==") for line in (Path(__file__).parent / "requirements.txt").read_text().split() if "==" in line
)


def test_client_versions_are_those_of_the_requirements():
    assert {"openai": openai.__version__, "anthropic": anthropic.__version__} == REQUIRED
    assert os.environ["RLLM_CLIENTS"] in str(openai.__file__)
