import pytest

from .proof import Variant
from .rollouts import Framework
from .shopping import PRICES, Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="dspy", package="dspy")
FRESH = "each call is a prompt of its own, which tells what was done so far"


def fields(**values: str) -> str:
    """An answer as DSPy's adapter for chats wants it."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items()) + "[[ ## completed ## ]]"


def step(thought: str, tool: str, arguments: str) -> str:
    return fields(next_thought=thought, next_tool_name=tool, next_tool_args=arguments)


def ending(prompt: str, total: str) -> str:
    """Both prices are known: say so, and once that is said, give the answer."""
    if "next_tool_name" in prompt.partition("<|im_start|>user")[0]:
        return step("That was all.", "finish", "{}")
    return fields(reasoning="The prices are added up.", answer=f"Together they cost {total} euro.")


REACT = Speech(call=lambda prompt, arguments: step("I need a price.", "price", arguments), final=ending)
VARIANTS = [
    Variant(
        way=way, endpoint="chat", speech=REACT, num_calls=len(PRICES) + 2, num_sequences=len(PRICES) + 2, notes=FRESH
    )
    for way in ("react", "async", "parallel")
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
