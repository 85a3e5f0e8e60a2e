"""The functions that users of the rLLM framework import from here; their homes are `context` and `client`."""

from rllm.sdk.client import get_chat_client, get_chat_client_async
from rllm.sdk.context import session

__all__ = ["get_chat_client", "get_chat_client_async", "session"]
