"""A shop assistant on Google's ADK, which asks a tool for prices: `python agent.py run` (or one of `WAYS`).

LiteLLM takes OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import asyncio
import os
import sys

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    packing = Packing.model_validate(packing)
    total = quantity * PRICES[item] + (0.50 if packing.gift else 0)
    return f"{total:.2f} euro for {item} in {packing.paper} paper"


agent = LlmAgent(name="shop", model=LiteLlm(model=f"openai/{MODEL}"), instruction="You sell sweets.", tools=[price])


async def run(streaming: StreamingMode = StreamingMode.NONE) -> str:
    runner = InMemoryRunner(agent=agent, app_name="shop")
    session = await runner.session_service.create_session(app_name="shop", user_id="guest")
    asked = types.Content(role="user", parts=[types.Part(text=QUESTION)])
    config, answer = RunConfig(streaming_mode=streaming), ""
    async for event in runner.run_async(user_id="guest", session_id=session.id, new_message=asked, run_config=config):
        if event.is_final_response():
            answer = "".join(part.text or "" for part in event.content.parts if not part.thought)
    return answer


WAYS = {"run": run, "stream": lambda: run(StreamingMode.SSE)}

if __name__ == "__main__":
    print(asyncio.run(WAYS[sys.argv[1]]()))
