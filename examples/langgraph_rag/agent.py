"""A retrieval agent in LangGraph: it searches a corpus until it can answer from what it found."""

from pathlib import Path
from typing import Any

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from rllm.rewards.search_reward import RewardConfig, RewardInput, RewardSearchFn
from rllm.sdk import get_chat_client, get_chat_client_async
from rllm.tools.local_search import LocalSearch

CORPUS = Path(__file__).with_name("corpus.jsonl")
SYSTEM = "Answer with a number."
MAX_TURNS = 4

index = LocalSearch(CORPUS, top_k=2)
judge = RewardSearchFn(RewardConfig())


@tool
def search(query: str) -> str:
    """Find lighthouses."""
    return "\n".join(found["text"] for found in index.forward(query))


model = ChatOpenAI(model="policy", client=get_chat_client(), async_client=get_chat_client_async(), max_tokens=64)
model_with_tools = model.bind_tools([search])


async def think(state: MessagesState) -> dict[str, Any]:
    """Search once more, or answer."""
    return {"messages": [await model_with_tools.ainvoke([SystemMessage(SYSTEM), *state["messages"]])]}


graph = (
    StateGraph(MessagesState)
    .add_node("think", think)
    .add_node("tools", ToolNode([search]))
    .add_edge(START, "think")
    .add_conditional_edges("think", tools_condition)
    .add_edge("tools", "think")
    .compile()
)


async def run_agent(question: str, ground_truth: str, **kwargs: Any) -> float:
    """Answer a question; the reward is 1.0 for the right answer, otherwise the F1 of its words."""
    answer = ""
    try:
        async for update in graph.astream({"messages": [("user", question)]}, {"recursion_limit": 2 * MAX_TURNS}):
            answer = next(iter(update.values()))["messages"][-1].text
    except GraphRecursionError:  # it kept searching
        return 0.0
    return judge(RewardInput(task_info={"ground_truth": ground_truth}, action=answer)).reward
