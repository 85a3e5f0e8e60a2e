"""The compiled reader gives what Python's gives, or leaves it to Python."""

import json
from array import array

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rllm._runtime import native
from rllm.capture.tokens import with_lists
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream.answers import parse_plain_answer
from rllm.store import codec
from rllm.store.memory import MemoryTraceStore
from rllm.store.sqlite import SqliteTraceStore
from rllm.types import Trace

pytestmark = pytest.mark.skipif(native.compiled is None, reason="rllm_native is not installed: make native")

MOST = 1e-4
ENTRY = {"token": 'a"\\', "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "}", "logprob": -1.5}]}
CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": 'a]} "token_ids":[7]', "reasoning": None},
    "logprobs": {"content": [ENTRY, {"logprob": -1}]},
    "finish_reason": "stop",
    "token_ids": [5, 6],
}
ANSWER = {
    "id": "x",
    "unheard_of": [{}],
    "choices": [CHOICE],
    "usage": {"total_tokens": 5},
    "prompt_token_ids": [1, 2, 3],
}


def scan(body):
    return native.compiled.scan_answer(body, MOST)


def number(written):
    """How a log-probability that is written like this is read; `None` if it is refused."""
    found = scan(
        b'{"prompt_token_ids":[1],"choices":[{"token_ids":[1],"logprobs":{"content":[{"logprob":%s}]}}]}' % written
    )
    return None if found is None else found[2][0][1][0]


# --- numbers -----------------------------------------------------------------------------------------------------------


@given(st.floats(max_value=0, allow_nan=False, allow_infinity=False))
@example(-5e-324)
@example(-1.7976931348623157e308)
def test_doubles_are_read_to_the_bit(value):
    assert number(repr(value).encode()).hex() == value.hex()


@given(st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32))
def test_floats_that_servers_print_as_doubles_are_read_to_the_bit(value):
    assert number(json.dumps(value).encode()).hex() == value.hex()


digits = st.text("0123456789", min_size=1, max_size=30)


@given(digits, digits | st.none(), st.integers(-340, 320) | st.none())
@example("9007199254740993", "0", None)  # halfway between two doubles: to the even one
@example("9007199254740993", "00000000000000000001", None)  # a little above
@example("1844674407370955161", "5", None)  # 2^64 - 1 as digits
@example("9999999999999999999", None, -19)
def test_any_decimal_is_read_as_python_reads_it(whole, fraction, exponent):
    text = "-" + (whole.lstrip("0") or "0")
    text += "" if fraction is None else f".{fraction}"
    text += "" if exponent is None else f"e{exponent}"
    expected = float(text)
    read = number(text.encode())
    if read is None:
        assert expected in (0.0, float("-inf"))
    else:
        assert read.hex() == expected.hex()


@pytest.mark.parametrize(
    "written",
    [
        "01",
        "-",
        "+1",
        "-.5",
        "-1.",
        "-1e",
        "-1e+",
        "NaN",
        "-Infinity",
        "-0x1",
        "1",
        "-1 2",
        "0.001",
        '"-1"',
        "null",
        "",
    ],
)
def test_what_is_no_log_probability_is_refused(written):
    assert number(written.encode()) is None


@pytest.mark.parametrize(
    "ids", ["[-1]", "[4294967296]", "[1.0]", "[1e2]", "[01]", "[1,]", "[,1]", "[1 2]", "[true]", "[[1]]", "null", "1"]
)
def test_what_are_no_token_ids_are_refused(ids):
    assert scan(json.dumps(ANSWER).encode().replace(b"[5, 6]", ids.encode())) is None


def test_the_greatest_id_is_one():
    rest, prompt_ids, _ = scan(json.dumps({**ANSWER, "prompt_token_ids": [0, 2**32 - 1]}).encode())
    assert prompt_ids.tolist() == [0, 2**32 - 1]
    assert json.loads(rest)["prompt_token_ids"] is None


def test_a_whole_number_has_no_sign_of_zero():
    assert number(b"-0") is None
    assert number(b"-0.0").hex() == (-0.0).hex()


def test_an_exponent_of_any_length_is_read_as_python_reads_it():
    for written in (b"-0." + b"0" * 99_990 + b"1e99991", b"-0." + b"0" * 99_990 + b"1e999990"):
        assert number(written) == (float(written) if float(written) > float("-inf") else None)


# --- whole answers -----------------------------------------------------------------------------------------------------


def as_lists(value):
    """Arrays as what they stand for."""
    if isinstance(value, dict):
        return {name: as_lists(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_lists(item) for item in value]
    return value.tolist() if isinstance(value, array) else value


def bare(answer):
    """An answer of which only the numbers of its log-probabilities are kept."""
    choices = [
        {**choice, "logprobs": {"token_logprobs": [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]}}
        for choice in answer["choices"]
    ]
    return {**answer, "choices": choices}


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
entries = st.fixed_dictionaries(
    {"logprob": st.floats(-99, 0) | st.integers(-9, 0)},
    optional={"token": st.text(max_size=9), "bytes": values, "top_logprobs": values},
)
choices = st.fixed_dictionaries(
    {
        "index": st.integers(0, 3),
        "message": st.fixed_dictionaries({"role": st.just("assistant"), "content": st.text(max_size=20)}),
        "logprobs": st.fixed_dictionaries({"content": st.lists(entries, max_size=3)}, optional={"refusal": st.none()}),
        "token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=3),
    },
    optional={"finish_reason": st.sampled_from([None, "stop"]), "stop_reason": st.text(max_size=3)},
)
answers = st.fixed_dictionaries(
    {
        "choices": st.lists(choices, min_size=1, max_size=2),
        "prompt_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=4),
    },
    optional={"id": st.text(max_size=5), "unheard_of": values},
)
spacing = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])


@given(answers, spacing, st.booleans())
@example(ANSWER, (",", ":"), False)
def test_a_plain_answer_is_read_as_it_is(answer, separators, ensure_ascii):
    body = json.dumps(answer, separators=separators, ensure_ascii=ensure_ascii).encode()
    parsed = parse_plain_answer(body, as_arrays=True)
    assert as_lists(parsed) == bare(answer)
    assert list(parsed) == list(answer)


@given(answers, st.data())
def test_damaged_bytes_are_never_taken_for_other_tokens(answer, data):
    body = bytearray(json.dumps(answer, separators=(",", ":")).encode())
    for _ in range(data.draw(st.integers(1, 2))):
        start = data.draw(st.integers(0, len(body)))
        end = min(len(body), start + data.draw(st.integers(0, 4)))
        body[start:end] = data.draw(
            st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"null", b" "])
        )
    try:
        parsed = parse_plain_answer(bytes(body), as_arrays=True)
    except UpstreamError:  # another field has the wrong type, as it has for Python
        return
    if parsed is None:
        return
    whole = json.loads(body.decode(errors="replace"), strict=False)
    assert as_lists(parsed["prompt_token_ids"]) == whole["prompt_token_ids"]
    for choice, expected in zip(parsed["choices"], whole["choices"], strict=True):
        assert as_lists(choice["token_ids"]) == expected["token_ids"]
        assert as_lists(choice["logprobs"]) == bare({"choices": [expected]})["choices"][0]["logprobs"]


@given(answers, st.data())
def test_an_answer_that_is_cut_short_is_refused(answer, data):
    body = json.dumps(answer).encode()
    assert scan(body[: data.draw(st.integers(0, len(body) - 1))]) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_token_ids": None},
        {"choices": None},
        {"choices": []},
        {"choices": [CHOICE, {**CHOICE, "token_ids": None}]},
        {"choices": [{**CHOICE, "logprobs": None}]},
        {"choices": [{**CHOICE, "logprobs": {"content": None}}]},
        {"choices": [{**CHOICE, "logprobs": {"content": [ENTRY], "tokens": []}}]},
        {"choices": [{**CHOICE, "logprobs": {"content": [{"token": "a"}]}}]},
        {"choices": [{**CHOICE, "logprobs": {"content": [{"token": "token_id:5", "logprob": -1}]}}]},
    ],
)
def test_an_answer_that_lacks_something_is_left_to_python(changed):
    assert scan(json.dumps({**ANSWER, **changed}).encode()) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"token_ids"', b'"token_ids":[1],"token_ids"'),
        (b'"prompt_token_ids"', b'"prompt_token_ids":[1],"prompt_token_ids"'),
        (b'"choices"', b'"choices":[],"choices"'),
        (b'"logprobs"', b'"logprobs":null,"logprobs"'),
        (b'"logprob"', b'"logprob":-1,"logprob"'),
        (b'"token_ids"', b'"token\\u005fids"'),
        (b'"index"', b'"token\\u005fids"'),
    ],
)
def test_names_that_are_there_twice_or_disguised_are_left_to_python(old, new):
    body = json.dumps(ANSWER).encode()
    assert scan(body) is not None
    assert scan(body.replace(old, new, 1)) is None


def test_an_answer_with_an_error_is_left_to_whoever_tells_errors():
    assert parse_plain_answer(json.dumps({**ANSWER, "error": {"message": "no"}}).encode(), as_arrays=True) is None


def test_what_is_nested_very_deeply_is_left_to_python():
    deep = "[" * 100_000 + "]" * 100_000
    assert scan(json.dumps(ANSWER).replace("[{}]", deep).encode()) is None


def test_memory_is_given_back():
    body = json.dumps({**ANSWER, "prompt_token_ids": list(range(20_000))}).encode()
    broken, stream = body[:-1], b"data: " + body

    def read_some():
        for _ in range(300):
            assert scan(body) is not None
            assert scan(broken) is None
            assert len(native.compiled.scan_events(stream, MOST)) == 1
        return psutil.Process().memory_info().rss

    read_some()
    before = read_some()
    assert read_some() - before < 20e6  # a leak of each would be 24 MB at least


# --- behind the gateway, and in the store ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("asked", [{}, {"return_token_ids": True}, {"logprobs": True}, {"n": 2}])
def test_a_gateway_answers_and_keeps_the_same_with_it_and_without(serve, monkeypatch, stream, asked):
    def ask():
        served = serve(["one two", "three"], upstream="http")
        sent = [{"role": "user", "content": "hi"}]
        told = []
        for _ in range(2):
            answer = served.post(json={"model": "m", "messages": sent, "stream": stream, **asked})
            told.append((answer.status_code, "token_ids" in answer.text, "token_logprobs" in answer.text))
        traces = served.store.by_session("s")
        return told, [
            (trace.prompt_ids, trace.response_ids, trace.logprobs, trace.response["content"]) for trace in traces
        ]

    with_it = ask()
    monkeypatch.setattr(native, "compiled", None)
    assert with_it == ask()
    assert all(isinstance(values, list) for trace in with_it[1] for values in trace[:3])


class LinesStore(MemoryTraceStore):
    """A user's store, which looks at traces before it keeps them."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def add(self, traces, *, session=None):
        self.lines += [json.dumps(trace.to_dict()) for trace in traces]
        return super().add(traces, session=session)


class OwnSqlStore(SqliteTraceStore):
    add = LinesStore.add


@pytest.mark.parametrize("stream", [True, False])
def test_users_stores_get_lists(serve, stream):
    store = LinesStore()
    served = serve(["one"], upstream="http", store=store)
    served.post(
        json={"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    ).raise_for_status()
    [line] = store.lines
    assert json.loads(line)["error"] is None


def test_a_subclass_of_ours_may_be_a_users_store(tmp_path):
    with SqliteTraceStore(tmp_path / "a.db") as ours, OwnSqlStore(tmp_path / "b.db") as theirs:
        assert (ours.takes_arrays, theirs.takes_arrays) == (True, False)


def test_a_trace_is_given_to_users_with_lists():
    tokens = {"prompt_ids": array("I", [1]), "response_ids": array("I", [2]), "logprobs": array("d", [-1.0])}
    trace = Trace(id="a", call_id="a", session_id="s", model="m", messages=[], response={}, **tokens)
    assert with_lists(trace) == Trace(
        id="a",
        call_id="a",
        session_id="s",
        model="m",
        messages=[],
        response={},
        prompt_ids=[1],
        response_ids=[2],
        logprobs=[-1.0],
    )


@given(st.lists(st.floats(-99, 0, width=32) | st.floats(allow_infinity=False, allow_nan=False), max_size=99))
def test_floats_are_packed_alike(numbers):
    assert codec.pack_floats(array("d", numbers)) == codec.pack_floats(numbers)
