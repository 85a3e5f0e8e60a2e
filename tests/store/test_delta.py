import dataclasses
from typing import Any

import pytest

from rllm.store.codec import to_json
from rllm.store.rows import (
    SCHEMA,
    TRACE_COLUMNS,
    Delta,
    EncodedTrace,
    RecentTraces,
    columns_of,
    create_tables,
    decode_document,
    kinds_of,
    trace_to_row,
)
from rllm.types import Trace

from .sample_traces import trace_of, turn_of


def recent(*traces: Trace) -> RecentTraces:
    known = RecentTraces()
    known.remember(map(EncodedTrace.of, traces))
    return known


def delta_of(trace: Trace, *earlier: Trace) -> Delta | None:
    return recent(*earlier).delta_of(EncodedTrace.of(trace))


def test_later_changes_to_a_trace_do_not_affect_its_encoding():
    trace = trace_of(metadata={"k": 1})
    encoded = EncodedTrace.of(trace)
    before = trace_to_row(encoded, 1)
    trace.metadata["k"], trace.prompt_ids[0], trace.messages[0]["content"] = 2, 9, "other"
    assert trace_to_row(encoded, 1) == before


def test_turn_is_stored_as_a_delta():
    delta = delta_of(turn_of(10), turn_of(9))
    assert (delta.num_ids, delta.num_messages, delta.fields) == (300, 20, ["tools", "metadata"])
    encoded = EncodedTrace.of(turn_of(10))
    assert len(encoded.document_without(delta)) < len(encoded.document_without(None)) / 2


def test_omitted_fields_are_restored():
    blob = EncodedTrace.of(turn_of(10)).document_without(delta_of(turn_of(10), turn_of(9)))
    document, shared_ids, _ = decode_document(blob, turn_of(9))
    assert shared_ids == list(range(1000, 1300))
    assert document["messages"] == turn_of(10).messages
    assert (document["tools"], document["metadata"]) == (turn_of(10).tools, {"task": 7})


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"messages": turn_of(3).messages},
        {"messages": [{"role": "user", "content": "other"}, *turn_of(10).messages[1:]]},
        {"messages": [*turn_of(10).messages, {"role": "user", "content": "\ud800"}]},
        {"messages": []},
    ],
)
def test_encoding_does_not_depend_on_the_earlier_trace(change: Any):
    trace = turn_of(10, **change)
    for earlier in (turn_of(9), trace, turn_of(9, messages=[])):
        assert EncodedTrace.of(trace, EncodedTrace.of(earlier).fingerprint) == EncodedTrace.of(trace)


def test_messages_of_the_earlier_trace_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch):
    earlier, written = EncodedTrace.of(turn_of(9)).fingerprint, []
    monkeypatch.setattr("rllm.store.rows.to_json", lambda value: written.append(value) or to_json(value))
    trace = turn_of(10)
    EncodedTrace.of(trace, earlier)
    assert [value for value in written if value in trace.messages] == trace.messages[-2:]


def test_turn_is_not_read_without_its_base():
    blob = EncodedTrace.of(turn_of(10)).document_without(delta_of(turn_of(10), turn_of(9)))
    with pytest.raises(LookupError):
        decode_document(blob, None)


def test_samples_of_one_prompt_share_it():
    assert delta_of(trace_of("b", response_ids=[6]), trace_of("a")).num_ids == 3


def test_shared_metadata_alone_does_not_need_a_base():
    assert (
        delta_of(trace_of("b", metadata={"k": 1}, prompt_ids=[9], messages=[]), trace_of("a", metadata={"k": 1}))
        is None
    )


CHANGES = [
    {"prompt_ids": [1]},
    {"response_ids": [1]},
    {"messages": []},
    {"response": {}},
    {"tools": None},
    {"sampling": {}},
    {"requested_sampling": {"n": 2}},
    {"metadata": {"task": 8}},
]


@pytest.mark.parametrize("change", CHANGES, ids=[next(iter(change)) for change in CHANGES])
def test_digest_covers_everything_a_later_turn_may_omit(change: dict[str, Any]):
    assert EncodedTrace.of(turn_of(1, **change)).fingerprint.digest != EncodedTrace.of(turn_of(1)).fingerprint.digest


def test_digest_depends_on_the_start_of_the_answer():
    one = trace_of(prompt_ids=[1, 2], response_ids=[3])
    two = dataclasses.replace(one, prompt_ids=[1], response_ids=[2, 3])
    assert EncodedTrace.of(one).fingerprint.digest != EncodedTrace.of(two).fingerprint.digest


def test_base_is_the_parent_or_the_latest_of_its_session():
    known = recent(turn_of(0), turn_of(1), turn_of(0, "other"))
    bases = [known.delta_of(EncodedTrace.of(turn_of(number))).base.id for number in (1, 2, 3)]
    assert bases == ["turn 0", "turn 1", "turn 1"]
    assert known.delta_of(EncodedTrace.of(turn_of(1, "other"))).base.id == "turn 0"
    assert recent().delta_of(EncodedTrace.of(turn_of(1))) is None


def test_cache_of_recent_traces_is_limited():
    known = recent(*(trace_of(f"{number}") for number in range(20)))
    known.remember(EncodedTrace.of(trace_of("a", f"session {number}", messages=[])) for number in range(5000))
    assert sum(len(traces) for traces in known._sessions.values()) == 4096


def test_columns_follow_from_the_fields_of_a_trace():
    kinds = columns_of(Trace, default="document")
    assert [name for name in kinds if kinds[name] in ("ids", "floats")] == ["prompt_ids", "response_ids", "logprobs"]
    assert (kinds["parent_id"], kinds["logprobs_kind"], kinds["started_at"]) == ("text", "text", "real")
    assert "session_id" not in kinds


def test_exported_types_do_not_depend_on_how_fields_are_stored():
    document = {"store": "document"}
    record = dataclasses.make_dataclass(
        "Record",
        [
            ("build", str | None, dataclasses.field(default=None, metadata=document)),
            ("seconds", float, dataclasses.field(default=0.0, metadata=document)),
            ("timings", dict[str, float], dataclasses.field(default_factory=dict, metadata=document)),
        ],
    )
    assert kinds_of(record) == {"build": "text", "seconds": "real", "timings": None}
    assert columns_of(record) == {}


def test_changed_columns_need_a_new_schema():
    # A store is rejected by its version alone: increase SCHEMA when this changes.
    assert SCHEMA == 4
    assert ", ".join(TRACE_COLUMNS) == (
        "id, call_id, choice_index, parent_id, model, logprobs_kind, finish_reason, weight_version, template_hash, "
        "started_at, error, prompt_ids, response_ids, logprobs, document, digest"
    )
    types = {name: name.upper() for name in ("key", "text", "integer", "real", "blob")}
    assert create_tables(types)[2] == (
        "CREATE TABLE credits (session INTEGER NOT NULL, trace_id TEXT, training_step INTEGER, episode_id TEXT, "
        "trajectory_name TEXT, trajectory_index INTEGER, reward REAL, group_id TEXT, baseline REAL, advantage REAL, "
        "trainer_logprobs BLOB, dropped TEXT, PRIMARY KEY (session, trace_id, training_step, trajectory_index))"
    )
