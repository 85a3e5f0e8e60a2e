import json
import os
import sysconfig
from pathlib import Path

import pytest

from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.sdk import run_program
from rllm.sdk.variables import QUIET
from rllm.store.memory import MemoryTraceStore

from .proof import Variant
from .rollouts import EXAMPLES, ROOT, TIMEOUT_S, Framework
from .shopping import PLAIN, PRICES, Shopper, Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="dspy", package="dspy")
NUM_CALLS = len(PRICES) + 2
FRESH = "each call is a prompt of its own that describes the steps so far"


def fields(**values: str) -> str:
    """Return an answer in the format of DSPy's chat adapter."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items()) + "[[ ## completed ## ]]"


def step(thought: str, tool: str, arguments: str) -> str:
    return fields(next_thought=thought, next_tool_name=tool, next_tool_args=arguments)


def ending(prompt: str, total: str) -> str:
    """Write a comment once both prices are known, and then the answer."""
    if "next_tool_name" in prompt.partition("<|im_start|>user")[0]:
        return step("That was all.", "finish", "{}")
    return fields(reasoning="The prices are added up.", answer=f"Together they cost {total} euro.")


REACT = Speech(call=lambda prompt, arguments: step("I need a price.", "price", arguments), final=ending)
VARIANTS = [
    Variant(
        way=way,
        endpoint="chat",
        streaming=way == "stream",
        speech=REACT,
        num_calls=NUM_CALLS,
        num_sequences=NUM_CALLS,
        notes=FRESH,
    )
    for way in ("react", "async", "stream", "parallel")
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)


@pytest.mark.parametrize("way", ["parallel", "gathered"])
def test_rollouts_in_one_process_keep_their_calls_apart(way, engine):
    engine.script = lambda prompt: Shopper(mood=PLAIN, speech=REACT)(prompt)
    engine.sampled = []
    with GatewayServer(MemoryTraceStore(), EngineUpstream(engine, "policy")) as gateway:
        program = Path(__file__).with_name("dspy_rollouts.py")
        path = os.pathsep.join([str(ROOT / "src"), str(EXAMPLES / "dspy")])
        command = [FRAMEWORK.python, program, gateway.url, way, sysconfig.get_path("purelib")]
        done = run_program(command, timeout_s=TIMEOUT_S, env={"PYTHONPATH": path, **QUIET})
    assert done.exit_code == 0, done.stderr
    rollouts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(rollout["reward"], len(rollout["steps"])) for rollout in rollouts] == [(1.0, 3 * NUM_CALLS)] * 4
    for rollout in rollouts:
        prompts = [engine.tokenizer.decode(step["prompt_ids"]) for step in rollout["steps"]]
        assert all(f"{rollout['buyer']} asks, time" in prompt for prompt in prompts)
    stored = [(step["prompt_ids"], step["response_ids"]) for rollout in rollouts for step in rollout["steps"]]
    assert sorted(stored) == sorted((item.prompt_ids, item.completion_ids) for item in engine.sampled)
