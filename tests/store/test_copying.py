import math
from pathlib import Path

import pytest

from rllm.errors import StoreError
from rllm.store import TraceStore, open_store
from rllm.store.maintenance import CopyProgress, copy_store
from rllm.types import StepCredit

from .sample_traces import trace_of, turn_of


@pytest.fixture
def source(tmp_path: Path):
    """70 sessions, so that there are two pages."""
    with open_store(str(tmp_path / "source.db")) as store:
        for number in range(69):
            store.open_session(f"s{number}", {"task": number}, created_at=100.0 + number)
            store.add([trace_of("a", f"s{number}")])
        store.annotate(
            [
                StepCredit(
                    trace_id="a",
                    training_step=1,
                    session_id="s3",
                    episode_id="t:0",
                    trajectory_name="agent",
                    reward=0.5,
                    trainer_logprobs=[-0.5, -0.25],
                )
            ]
        )
        for number in range(10):
            store.add([turn_of(number, "talk")]).result()
        yield store


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def target(request: pytest.FixtureRequest, tmp_path: Path):
    url = str(tmp_path / "target.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with open_store(url) as store:
        yield store


def everything(store: TraceStore) -> list[object]:
    sessions = store.sessions(limit=1000, oldest_first=True)
    return [(info, store.by_session(info.id), store.credits(info.id)) for info in sessions]


def test_everything_is_copied_and_a_second_copy_does_nothing(source: TraceStore, target: TraceStore):
    progress: list[CopyProgress] = []
    copied = copy_store(source, target, progress.append)
    assert copied == progress[-1] == CopyProgress(num_sessions=70, num_traces=79)
    assert [step.num_sessions for step in progress] == [64, 70]
    assert everything(target) == everything(source)
    assert copy_store(source, target, progress.append) == CopyProgress(num_skipped=70)


def test_interrupted_copy_continues(source: TraceStore, target: TraceStore):
    class Interrupted(Exception):
        pass

    def interrupt(_: CopyProgress) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        copy_store(source, target, interrupt)
    talk = source.session("talk")
    assert talk is not None
    target.open_session("talk", {}, created_at=talk.created_at)
    target.add(source.by_session("talk")[:4]).result()  # and half of a session
    assert copy_store(source, target, lambda _: None) == CopyProgress(num_sessions=6, num_traces=15, num_skipped=64)
    assert sorted(map(repr, everything(target))) == sorted(map(repr, everything(source)))


def test_text_unsupported_by_some_databases_does_not_stop_a_copy(source: TraceStore, target: TraceStore):
    """For example the name of a model that an agent requests."""
    source.add([trace_of("odd", "s5", model="m\0", error="no \0")])
    source.annotate(
        [
            StepCredit(
                trace_id="odd",
                training_step=1,
                session_id="s5",
                episode_id="t\0:0",
                trajectory_name="agent",
                reward=0.5,
            )
        ]
    ).result()
    copied = copy_store(source, target, lambda _: None)
    assert copied.num_traces == 80
    assert copy_store(source, target, lambda _: None) == CopyProgress(num_skipped=70)
    assert target.by_session("s5")[1].model in ("m\0", "m\\x00")


def test_copied_conversation_stays_small(source: TraceStore, tmp_path: Path):
    long = [turn_of(number, "long") for number in range(60)]
    for turn in long:
        source.add([turn]).result()
    with open_store(str(tmp_path / "small.db")) as target:
        copy_store(source, target, lambda _: None)
        assert target.num_bytes() < 1.3 * source.num_bytes()


def test_non_finite_numbers_do_not_stop_a_copy(source: TraceStore, target: TraceStore):
    """A policy that has diverged has such numbers."""
    source.add([trace_of("odd", "s5", logprobs=[math.nan, -math.inf])])
    credit = {"episode_id": "t:0", "trajectory_name": "agent", "reward": math.nan, "trainer_logprobs": [math.nan, -1.0]}
    source.annotate([StepCredit(trace_id="odd", training_step=1, session_id="s5", **credit)]).result()
    assert copy_store(source, target, lambda _: None).num_traces == 80
    assert copy_store(source, target, lambda _: None) == CopyProgress(num_skipped=70)
    assert math.isnan(target.by_session("s5")[1].logprobs[0])


@pytest.mark.parametrize("metadata", [{}, {"task": 5}])
def test_other_traces_with_the_same_name_are_detected_and_kept(
    source: TraceStore, target: TraceStore, metadata: dict[str, int]
):
    target.open_session("s5", metadata)
    target.add([trace_of("other", "s5")]).result()
    with pytest.raises(StoreError, match="'s5'"):
        copy_store(source, target, lambda _: None)
    assert [trace.id for trace in target.by_session("s5")] == ["other"]
    assert target.session("s5").metadata == metadata  # type: ignore[union-attr]


def test_trace_replaced_since_the_copy_is_copied_again(source: TraceStore, target: TraceStore):
    copy_store(source, target, lambda _: None)
    again = trace_of("a", "s5", response_ids=[9], logprobs=[-9.0])
    source.add([again]).result()
    assert copy_store(source, target, lambda _: None) == CopyProgress(num_sessions=1, num_traces=1, num_skipped=69)
    assert target.by_session("s5") == [again]
