import pytest

from rllm.gateway.errors import GatewayError
from rllm.gateway.identity import authorization_of, authorize


@pytest.mark.parametrize(
    ("authorization", "key", "session_id"),
    [
        ("", None, None),
        ("Bearer sk-1", None, None),
        ("Bearer rllm-a", None, "a"),
        ("Bearer rllm-", None, None),
        ("Bearer secret", "secret", None),
        ("Bearer secret:rllm-a", "secret", "a"),
        ("Bearer se:cret", "se:cret", None),
    ],
)
def test_a_key_admits_and_may_name_a_session(authorization, key, session_id):
    assert authorize(authorization, key) == session_id


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Basic secret", "Bearer rllm-a", "Bearer secretly"])
def test_a_wrong_key_is_refused(authorization):
    with pytest.raises(GatewayError) as refused:
        authorize(authorization, "secret")
    assert refused.value.status == 401


@pytest.mark.parametrize(
    ("headers", "authorization"),
    [
        ({}, ""),
        ({b"x-api-key": b"rllm-a"}, "Bearer rllm-a"),
        ({b"authorization": b"Bearer rllm-b", b"x-api-key": b"rllm-a"}, "Bearer rllm-b"),
    ],
)
def test_a_key_may_come_as_anthropics_clients_send_it(headers, authorization):
    assert authorization_of(headers) == authorization
