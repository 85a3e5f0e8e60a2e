"""Data of the pages: metrics, tokens, drift, times, batches, vocabularies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rllm.errors import StoreError, number, signed
from rllm.store.base import SessionInfo
from rllm.types import DRIFT_KEY, OUTCOME_KEY, SIDE_CALL_KEY, StepCredit
from rllm.viewer.batches import FedBatch, audit_batch, digest_of, read_batch, sequences_of
from rllm.viewer.charts import charts_of, neighbours, rows_of, series, sync_status
from rllm.viewer.graph import graph_of, timeline
from rllm.viewer.render import seconds
from rllm.viewer.rollouts import rollout_of
from rllm.viewer.runs import Run
from rllm.viewer.texts import MessageParts, message_parts, vocabulary_of
from rllm.viewer.tokens import drifts_of, shade, token_table

from .run_folders import outcome_of, segmented_calls, trace_of, write_vocabulary


def test_metrics_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(rows_of(path)) == []
    path.write_text('{"step":1,"a":1}\n{"step":1,"b":2}\nnot json\n{"step":2,"a":3}\n{"step":3,')
    assert [dict(row) for row in rows_of(path)] == [{"step": 1, "a": 1, "b": 2}, {"step": 2, "a": 3}]
    with path.open("a") as more:
        more.write('"a":null}\n')
    assert series(rows_of(path), "a") == [(1, 1.0), (2, 3.0)]
    path.write_text('{"step":1,"a":7}\n')
    assert series(rows_of(path), "a") == [(1, 7.0)], "a resumed run has cut the file"


def test_steps_have_neighbours() -> None:
    assert neighbours([1, 4, 9], 4) == (1, 9)
    assert neighbours([1, 4, 9], 5) == (4, 9)
    assert neighbours([1], 1) == (None, None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ""),
        (0.0, "0"),
        (-1.6e-16, "0"),
        (-0.0, "0"),
        (0.53123, "0.531"),
        (1234.5, "1234"),
        (3.14e-7, "3.1e-07"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_formatted_briefly(value: float | None, expected: str) -> None:
    assert number(value) == expected


def test_numbers_have_signs_and_durations_have_units() -> None:
    assert [signed(value) for value in (0.5, -0.5, 0.0, 2e-17, None)] == ["+0.5", "-0.5", "0", "0", ""]
    assert [seconds(value) for value in (0.25, 3.21, 245.0)] == ["250 ms", "3.2 s", "4:05 min"]


def test_long_run_keeps_its_peaks() -> None:
    rows = [{"step": step, "rollout/reward": 5.0 if step == 7777 else 0.0} for step in range(1, 20_001)]
    [chart] = charts_of([("long", rows)])
    points = chart.lines[0].points
    assert len(points) <= 420
    assert max(point.value for point in points) == 5.0


def test_rounding_noise_is_drawn_as_zero() -> None:
    rows = [{"step": step, "policy/loss": value} for step, value in enumerate([-1.6e-16, 2e-17, 1e-14])]
    [chart] = charts_of([("one", rows)])
    assert [point.value for point in chart.lines[0].points] == [0.0, 0.0, 0.0]
    large = [{"step": 1, "rollout/reward": 1e6}, {"step": 2, "rollout/reward": 1e-9}]
    assert [point.value for point in charts_of([("one", large)])[0].lines[0].points] == [1e6, 0.0]


def test_status_light_is_off_if_weights_are_missing_or_differ() -> None:
    rows = [
        {"step": 1, "policy/weight_version": 1, "policy/sampler_gap_mean": 1e-6, "tokens/staleness_max": 0},
        {"step": 2, "policy/weight_version": 1},
        {"step": 3, "policy/weight_version": 2, "policy/sampler_gap_mean": 0.3},
        {"step": 4, "policy/weight_version": 3, "tokens/staleness_max": 2},
    ]
    assert [light.state for light in sync_status(rows, max_staleness=1)] == ["ok", "bad", "warn", "bad"]


FIRST = trace_of("s", prompt_ids=[1, 2], response_ids=[3, 4], logprobs=[-0.5, -1.0])
SECOND = trace_of(
    "s", 1, parent_id="s-0", prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], logprobs=[-2.0], weight_version=3
)
ASIDE = trace_of("s", 2, prompt_ids=[1, 9], response_ids=[8], logprobs=[-0.1])


def credit_of(trace, **fields):
    found = {"training_step": 0, "episode_id": "e:0", "trajectory_name": "agent", "reward": 1.0, "advantage": 0.5}
    return StepCredit(trace_id=trace.id, session_id="s", **{**found, **fields})


def test_sequence_has_the_calls_that_sampled_its_tokens() -> None:
    calls = [FIRST, SECOND, ASIDE]
    table = token_table(SECOND, calls, [credit_of(FIRST, trainer_logprobs=[-0.25, -1.0]), credit_of(SECOND)], None)
    assert table.ids == [1, 2, 3, 4, 5, 6]
    assert table.spans == [(2, 4, FIRST.id), (5, 6, SECOND.id)]
    assert table.columns["mask"] == [0, 0, 2, 2, 0, 1]
    assert table.columns["sampler"] == [None, None, -0.5, -1.0, None, -2.0]
    assert table.columns["gap"] == [None, None, 0.25, 0.0, None, None]
    assert table.columns["version"] == [None, None, 0, 0, None, 3]


def fed(ids, sequence, *spans, logprob_sum=-3.5, **numbers) -> FedBatch:
    found = {"step": 1, "algorithm": "GRPO", "clip": (0.8, 1.2), "sampler_logprob_sum": logprob_sum}
    sequences = [{"length": len(sequence), "digest": digest_of(sequence), "spans": part} for part in spans]
    return FedBatch(**found, sequences=sequences_of(sequences), ids=ids, numbers=numbers)


def test_side_call_has_its_reason() -> None:
    outcome = {"trajectories": [{"name": "agent", "reward": 1.0, "steps": [{"id": FIRST.id}]}]}
    rollout = rollout_of(SessionInfo(id="s", created_at=0.0, num_traces=2, metadata={OUTCOME_KEY: outcome}))
    title = replace(ASIDE, response={"content": "A title"}, metadata={SIDE_CALL_KEY: "title"})
    first, aside = graph_of(rollout, [FIRST, title], [credit_of(FIRST)]).calls
    assert (first.dropped, aside.role) == (None, "no trajectory")
    assert aside.dropped is not None
    assert aside.dropped.startswith("side call (title)")


def test_clipped_tokens_are_those_outside_of_the_range_of_their_advantage() -> None:
    spans = [[FIRST.id, 2, 4], [SECOND.id, 5, 6]]
    batch = fed(
        [3, 4, 6], [1, 2, 3, 4, 5, 6], spans, advantage=[1.0, 1.0, -1.0], weight=[0.1] * 3, ratio=[1.5, 0.5, 0.5]
    )
    table = token_table(SECOND, [FIRST, SECOND], [], batch)
    assert [table.clipped(place) for place in (0, 2, 3, 5)] == [False, True, False, True]
    assert shade("ratio", 1.5, clipped=True) == "d5 clip"


def test_batch_that_differs_from_the_samples_is_detected() -> None:
    spans = [[FIRST.id, 2, 4], [SECOND.id, 5, 6]]
    rollout = rollout_of(SessionInfo(id="s", created_at=0.0, num_traces=2))
    credits_ = [credit_of(item, trainer_logprobs=item.logprobs) for item in (FIRST, SECOND)]

    def look(ids, sequence, advantage):
        batch = fed(ids, sequence, spans, advantage=advantage, weight=[0.1] * 3)
        audit = audit_batch(batch, [rollout], lambda _: ([FIRST, SECOND, ASIDE], credits_), {"tokens/trained": 3.0})
        return audit, {check.name: check.agrees for check in audit.checks}

    audit, agrees = look([3, 4, 6], [1, 2, 3, 4, 5, 6], [0.5] * 3)
    assert set(agrees.values()) == {True}
    assert audit.left_out == [("not in a trajectory", 1, 1)]
    title = replace(ASIDE, metadata={SIDE_CALL_KEY: "title"})
    audit = audit_batch(audit.batch, [rollout], lambda _: ([FIRST, SECOND, title], credits_), {})
    assert audit.left_out == [("side call", 1, 1)]
    audit, agrees = look([3, 9, 6], [1, 2, 3, 9, 5, 6], [0.5, 0.5, 0.75])
    assert (audit.sequences[0].same_ids, audit.sequences[0].same_context) == (False, False)
    assert audit.sequences[0].first_difference == f"call {FIRST.id}, token 1"
    assert not agrees["sum of advantages"]
    assert agrees["tokens"]


def test_shared_call_has_the_sum_of_its_advantages() -> None:
    rollout = rollout_of(SessionInfo(id="s", created_at=0.0, num_traces=1))
    scored = {"trainer_logprobs": FIRST.logprobs, "baseline": 0.0}
    credits_ = [
        credit_of(FIRST, trajectory_index=0, advantage=None, dropped="zero_variance"),
        credit_of(FIRST, trajectory_index=1, advantage=0.5, **scored),
        credit_of(FIRST, trajectory_index=2, advantage=-2.0, trajectory_name="critic", **scored),
    ]
    spans = [[FIRST.id, 2, 4]]
    numbers = {"advantage": [0.5, 0.5, -2.0, -2.0], "weight": [0.1] * 4}
    batch = fed([3, 4, 3, 4], [1, 2, 3, 4], spans, spans, logprob_sum=-3.0, **numbers)
    audit = audit_batch(batch, [rollout], lambda _: ([FIRST], credits_), {"tokens/trained": 4.0})
    assert {check.name: check.agrees for check in audit.checks if not check.agrees} == {}
    assert [(item.role, item.credited) for item in audit.sequences] == [("agent", 1.0), ("critic", -4.0)]
    assert audit.left_out == []
    [call] = graph_of(rollout, [FIRST], credits_).calls
    assert (call.advantage, call.credit.dropped, call.credit.baseline) == (-1.5, None, None)
    assert token_table(FIRST, [FIRST], credits_, batch).columns["advantage"][2:] == [-1.5, -1.5]


def test_damaged_batch_is_reported(tmp_path: Path) -> None:
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches/step-000001.json").write_text('{"step": 1}')
    with pytest.raises(StoreError, match=r"step-000001.json' is not a batch of this version"):
        read_batch(tmp_path, 1)
    assert read_batch(tmp_path, 2) is None


def test_drifted_tokens_are_aligned() -> None:
    text = {"role": "assistant", "content": "Four"}
    again = trace_of(
        "s",
        1,
        prompt_ids=[1, 2, 3, 40, 5, 6, 7, 8, 9, 10],
        messages=[*FIRST.messages, text],
        metadata={DRIFT_KEY: "template"},
    )
    prior = trace_of("s", prompt_ids=[1, 2, 3], response_ids=[4, 5, 6, 7, 8, 9], logprobs=[-1.0] * 6)
    [drift] = drifts_of([prior, again])
    assert (drift.cause, drift.num_common, drift.prior) == ("template", 3, prior)
    differing = [(piece.sampled, piece.rendered) for piece in drift.pieces if not piece.same]
    assert differing == [([4], [40])]
    assert drift.pieces[-1].rendered == [10], "new tokens after the answer are not a difference"


def test_long_prompts_are_aligned_at_rare_tokens() -> None:
    ids = [number % 3 and number for number in range(6000)]
    prior = trace_of("s", prompt_ids=ids, response_ids=[-2])
    [drift] = drifts_of(
        [prior, trace_of("s", 1, prompt_ids=[*ids[:100], -1, *ids[101:], -2], metadata={DRIFT_KEY: "edited"})]
    )
    assert [(piece.sampled, piece.rendered) for piece in drift.pieces if not piece.same] == [([100], [-1])]


def test_durations_are_separated_by_kind() -> None:
    info = SessionInfo(
        id="s", created_at=100.0, num_traces=2, metadata={OUTCOME_KEY: outcome_of(FIRST), "split": "train"}
    )
    calls = [
        trace_of("s", started_at=100.2, timings={"total_s": 0.1, "queue_s": 0.04}),
        trace_of("s", 1, started_at=100.5, timings={"total_s": 0.1}),
    ]
    [lane] = timeline([rollout_of(info)], {"s": calls}, now=1000.0)
    totals = {kind: round(lane.total(kind), 3) for kind in ("queue", "model", "tool", "reward")}
    assert totals == {"queue": 0.04, "model": 0.16, "tool": 0.4, "reward": 0.15}
    assert not lane.is_stuck


def test_silent_rollout_is_stuck() -> None:
    info = SessionInfo(id="s", created_at=100.0, num_traces=1, metadata={"split": "train", "training_step": 0})
    assert timeline([rollout_of(info)], {"s": [FIRST]}, now=5000.0)[0].is_stuck


def test_fork_starts_a_separate_line() -> None:
    calls = [
        FIRST,
        SECOND,
        trace_of("s", 3, parent_id="s-0", prompt_ids=[1, 2, 3, 4, 50], response_ids=[7], logprobs=[-1.0]),
    ]
    rollout = rollout_of(SessionInfo(id="s", created_at=0.0, num_traces=3))
    graph = graph_of(rollout, calls, [])
    assert [call.parent.number if call.parent else None for call in graph.calls] == [None, 1, 1]
    assert [call.branch for call in graph.calls] == [0, 0, 1]
    assert graph.num_forks == 1


def test_segments_are_a_tree_by_their_origin() -> None:
    calls = segmented_calls()
    graph = graph_of(rollout_of(SessionInfo(id="s", created_at=0.0, num_traces=6)), calls, [])
    found = [
        ([call.number for call in item.calls], item.depth, item.calls[0].begins, item.source and item.source.number)
        for item in graph.segments
    ]
    assert found == [
        ([1, 2], 0, "", None),
        ([3], 1, "quotes a tool call of", 2),
        ([4], 0, "", None),
        ([5, 6], 1, "quotes the answer of", 4),
    ]
    assert [segment.num_sampled for segment in graph.segments] == [4, 2, 2, 4]
    assert [call.branch for call in graph.calls] == [0, 0, 1, 0, 2, 2]


def test_rejected_request_has_no_continuation() -> None:
    refused = trace_of(
        "s", 0, messages=[], response={}, prompt_ids=[], response_ids=[], logprobs=[], error="n=0: use 1 or more"
    )
    rollout = rollout_of(SessionInfo(id="s", created_at=0.0, num_traces=2))
    graph = graph_of(rollout, [refused, trace_of("s", 1)], [])
    assert [call.parent for call in graph.calls] == [None, None]


def test_ids_become_text_without_a_tokenizer(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, ["a", " fig", "\n", "Ã", "©"])
    known = vocabulary_of(tmp_path, None)
    assert [known.text_of(item) for item in range(6)] == ["a", " fig", "\n", "⟨c3⟩", "⟨a9⟩", "⟨5⟩"]
    assert known.decode([3, 4]) == "é"
    model = tmp_path / "metaspace"
    model.mkdir()
    vocab = [["▁fig", -1.0], ["<0xC3>", -2.0]]
    found = {"model": {"vocab": vocab}, "added_tokens": [{"id": 2, "content": "<|end|>"}]}
    (model / "tokenizer.json").write_text(json.dumps(found))
    other = vocabulary_of(None, str(model))
    assert [other.hex_of(item) for item in range(3)] == [b" fig".hex(" "), "c3", b"<|end|>".hex(" ")]
    assert not vocabulary_of(tmp_path / "nothing", "org/model")


def test_vocabulary_equals_that_of_the_tokenizer(run: Run, run_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    [checkpoint] = sorted(run_folder.glob("checkpoints/step-*"))[-1:]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ids = tokenizer.encode("How many figs? Señor 漢字\n")
    assert run.vocabulary.decode(ids) == tokenizer.decode(ids)


def test_each_message_of_a_long_episode_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def looking(message: object) -> MessageParts:
        looked_at.append(message)
        return message_parts(message)

    monkeypatch.setattr("rllm.viewer.graph.message_parts", looking)
    messages = [{"role": "user", "content": str(number)} for number in range(40)]
    calls = [trace_of("s", number, messages=messages[: number + 1], prompt_ids=[number]) for number in range(40)]
    graph = graph_of(rollout_of(SessionInfo(id="s", created_at=0.0, num_traces=40)), calls, [])
    assert [call.parent.number if call.parent else 0 for call in graph.calls] == list(range(40))
    assert not any(call.is_exact for call in graph.calls[1:])
    assert len(looked_at) == sum(range(1, 41))
