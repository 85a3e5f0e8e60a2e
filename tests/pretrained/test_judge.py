"""A pretrained model behind `rllm serve` as judge. The server refuses schemas, so verdicts are read from its text."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rllm.rewards import judge
from rllm.rewards.reward_types import RewardOutput

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]
TASK = {"question": "What is the capital of France?"}
# The model is too small to follow the rubric's description of a verdict, but it imitates examples.
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% if loop.first -%}
<|im_start|>user
{"task": {"question": "What is 1 + 1?"}, "answer": "2"}<|im_end|>
<|im_start|>assistant
{"reasoning": "It is 2.", "scores": {"right": 10}}<|im_end|>
<|im_start|>user
{"task": {"question": "What do cows drink?"}, "answer": "A stone."}<|im_end|>
<|im_start|>assistant
{"reasoning": "It is not a stone.", "scores": {"right": 0}}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def test_verdicts_are_kept_and_an_unreachable_server_leaves_answers_unscored(smollm: Path, tmp_path: Path) -> None:
    (tmp_path / "judge.jinja").write_text(TEMPLATE)
    settings = ["model.chat_template=judge.jinja", "model.max_length=640"]
    command = [sys.executable, "-m", "rllm", "serve", str(smollm), "--port", "0", *settings]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = next(filter(None, (re.search(r"(http://\S+/v1)", line) for line in process.stdout)))
        rubric = {
            "model": "policy",
            "base_url": found[1],
            "criteria": [{"name": "right", "description": "The answer is right."}],
            "num_retries": 1,
            "timeout_s": 600,
        }

        def judged(answer: str) -> RewardOutput:
            """Judge as a new process would, with the verdicts in the folder."""
            scorer = judge(rubric)
            scorer.keep_in(tmp_path)
            output = scorer(TASK, answer)
            assert isinstance(output, RewardOutput)
            return output

        first = judged("Paris.")
        assert first.reward is not None, first.metadata
        assert first.parts == {"right": first.reward}
        assert first.metadata["judge/tokens_in"] > first.metadata["judge/tokens_out"] > 0
        process.send_signal(signal.SIGINT)
    again, other = judged("Paris."), judged("Berlin.")
    assert (again.reward, again.metadata["judge/cached"], again.metadata["judge/tokens_in"]) == (first.reward, 1.0, 0.0)
    assert other.reward is None
    assert "APIConnectionError" in other.metadata["error"]
