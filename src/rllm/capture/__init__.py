"""Model calls to traces: the one place where ids, log-probabilities and lengths are checked. No HTTP, no storage."""

from rllm.capture.chat import SAMPLING_FIELDS, failed_trace, sampling_of, traces_from_chat
from rllm.capture.conversations import Conversations, Prior, Said
from rllm.capture.sampled import trace_from_output
from rllm.capture.session_tree import CallNode, ParentIndex, SessionTree, continues, parent_of
from rllm.capture.side_calls import side_call, side_calls
from rllm.capture.stream import ChatStream, SSEDecoder
from rllm.capture.strip import strip_chunk
from rllm.capture.tokens import has_labels

__all__ = [
    "SAMPLING_FIELDS",
    "CallNode",
    "ChatStream",
    "Conversations",
    "ParentIndex",
    "Prior",
    "SSEDecoder",
    "Said",
    "SessionTree",
    "continues",
    "failed_trace",
    "has_labels",
    "parent_of",
    "sampling_of",
    "side_call",
    "side_calls",
    "strip_chunk",
    "trace_from_output",
    "traces_from_chat",
]
