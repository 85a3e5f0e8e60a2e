"""Conversion of model calls to traces: pure functions that know wire formats and tokens, but not HTTP or storage.

* `chat`: a chat completion, or an engine's answer, to traces. Read this first.
* `tokens`: ids and log-probabilities, taken from the wire and checked against each other.
* `stream`: server-sent events to chunks, chunks to whole completions.
* `session_tree`: which earlier call a prompt continues.
* `conversations`: which earlier answer a request's messages repeat, however the client rewrites it.
* `wire_formats`: the formats that agents speak, a row for each.
* `side_calls`: calls that do not belong to the task, such as a request for a title.
"""

from rllm.capture.chat import (
    SAMPLING_FIELDS,
    failed_trace,
    sampling_of,
    snapshot,
    trace_from_output,
    traces_from_chat,
)
from rllm.capture.conversations import Conversations, MessageDigests, PriorAnswer
from rllm.capture.session_tree import CallNode, ParentIndex, SessionTree, continues, packed_ids, parent_of
from rllm.capture.side_calls import side_call, side_calls
from rllm.capture.stream import ChatStream, SSEDecoder
from rllm.capture.tokens import has_labels

__all__ = [
    "SAMPLING_FIELDS",
    "CallNode",
    "ChatStream",
    "Conversations",
    "MessageDigests",
    "ParentIndex",
    "PriorAnswer",
    "SSEDecoder",
    "SessionTree",
    "continues",
    "failed_trace",
    "has_labels",
    "packed_ids",
    "parent_of",
    "sampling_of",
    "side_call",
    "side_calls",
    "snapshot",
    "trace_from_output",
    "traces_from_chat",
]
