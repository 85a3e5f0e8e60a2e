import json

import pytest

from .proof import Variant
from .rollouts import Framework
from .shopping import Speech

pytestmark = pytest.mark.frameworks


def final_tool(prompt, total):
    arguments = json.dumps({"answer": f"Together they cost {total} euro."})
    return f'<tool_call>\n{{"name": "final_answer", "arguments": {arguments}}}\n</tool_call>'


def python_call(prompt, arguments):
    asked = ", ".join(f"{name}={value!r}" for name, value in json.loads(arguments).items())
    return f"Thought: I need a price.\n<code>\nprint(price({asked}))\n</code>"


def python_final(prompt, total):
    return f"Thought: I know both.\n<code>\nfinal_answer('Together they cost {total} euro.')\n</code>"


FRAMEWORK = Framework(name="smolagents", package="smolagents")
TOOLS = Speech(final=final_tool)
CODE = Speech(call=python_call, final=python_final)
AS_TEXT = "past calls are written as text, and results as user messages: each call is a sequence of its own"
AS_CODE = "past answers end with a stop string, and get “Calling tools” added"
VARIANTS = [
    Variant(way="tools", endpoint="chat", speech=TOOLS, num_sequences=3, notes=AS_TEXT),
    Variant(way="tools_stream", endpoint="chat", streaming=True, speech=TOOLS, num_sequences=3, notes=AS_TEXT),
    Variant(way="tools_litellm", endpoint="chat", speech=TOOLS, num_sequences=3, notes=AS_TEXT),
    Variant(way="code", endpoint="chat", speech=CODE, notes=AS_CODE),
    Variant(
        way="code_stream",
        endpoint="chat",
        streaming=True,
        speech=CODE,
        notes=AS_CODE,
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
