"""A team of two AutoGen agents: one proposes, and the other agrees or asks for another try."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient
from roles import AGREED, CHECK, PROPOSE, checker_reward, proposer_reward

from rllm.sdk import TrajectoryView, get_chat_client_async, session

client = BaseOpenAIChatCompletionClient(
    get_chat_client_async(),
    create_args={"model": "policy"},
    model_info=ModelInfo(
        vision=False, function_calling=False, json_output=False, family="unknown", structured_output=False
    ),
)


def team() -> RoundRobinGroupChat:
    """Return a team that makes at most two proposals and checks each."""
    proposer = AssistantAgent("proposer", client, system_message=PROPOSE)
    checker = AssistantAgent("checker", client, system_message=CHECK)
    agreed = TextMentionTermination(AGREED, sources=["checker"])
    return RoundRobinGroupChat([proposer, checker], termination_condition=agreed, max_turns=4)


async def propose_and_check(question: str, target: int, nums: list[int], **kwargs: Any) -> list[TrajectoryView]:
    """Let the team talk; each agent's turns are a trajectory with its own reward."""
    task = {"target": target, "nums": nums}
    with session() as talk:
        result = await team().run(task=question)
    texts = [message.to_text() for message in result.messages if message.source != "user"]
    proposals, verdicts = texts[0::2], texts[1::2]
    return [
        TrajectoryView(name="checker", steps=talk.steps[1::2], reward=checker_reward(proposals, verdicts, task)),
        TrajectoryView(name="proposer", steps=talk.steps[0::2], reward=proposer_reward(proposals, task)),
    ]
