import pytest

from rllm.gateway.identity import session_of_baggage


@pytest.mark.parametrize(
    ("baggage", "session_id"),
    [
        ("", None),
        ("user=alice", None),
        ("rllm.session=a", "a"),
        ("user=alice , rllm.session = a%20b;ttl=3 ,x=y", "a b"),
        ("rllm.session=first,rllm.session=second", "first"),
        ("rllm.session=", None),
        ("rllm.session", None),
        ("not.rllm.session=a", None),
        ("user=rllm.session", None),
    ],
)
def test_baggage_may_name_the_session(baggage, session_id):
    assert session_of_baggage(baggage) == session_id
