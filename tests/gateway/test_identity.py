import pytest

from rllm.gateway.errors import GatewayError
from rllm.gateway.identity import Caller, authorization_of, authorize, session_key, unnamed_key


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
def test_key_grants_access_and_may_name_a_session(authorization, key, session_id):
    assert authorize(authorization, key) == Caller(session=session_id)


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Basic secret", "Bearer rllm-a", "Bearer secretly"])
def test_wrong_key_is_rejected(authorization):
    with pytest.raises(GatewayError) as refused:
        authorize(authorization, "secret")
    assert refused.value.status == 401


@pytest.mark.parametrize("session_id", ["a", "rollout 7: \u00fc/..", "x" * 256])
def test_session_key_is_valid_only_for_its_session(session_id):
    key = session_key("secret", session_id, 7)
    assert key.isascii()
    caller = authorize(f"Bearer {key}", "secret")
    assert caller == Caller(session=session_id, number=7, is_bound=True)
    caller.check(session_id)
    for other in ("b", None):
        with pytest.raises(GatewayError) as refused:
            caller.check(other)
        assert refused.value.status == 403
    with pytest.raises(GatewayError):
        caller.check_operator()


def test_key_for_calls_without_session_is_valid_for_nothing_else():
    caller = authorize(f"Bearer {unnamed_key('secret')}", "secret")
    caller.check(None)
    for check in (caller.check_operator, lambda: caller.check("a")):
        with pytest.raises(GatewayError) as refused:
            check()
        assert refused.value.status == 403


def test_session_key_cannot_be_made_without_the_gateway_key():
    name, mac = session_key("secret", "a", 1).rsplit(".", 1)
    other_name, other_mac = session_key("secret", "b", 1).rsplit(".", 1)
    forged = [
        session_key("guess", "a", 1),
        unnamed_key("guess"),
        "rllm.unnamed.",
        f"{name[:-1]}2.{mac}",
        f"{name[:-1]}+1.{mac}",
        f"{name[:-1]}01.{mac}",
        f"{name[:-1]}{'9' * 5000}.{mac}",
        f"{name}.{other_mac}",
        f"{other_name}.{mac}",
        f"{name}.",
        "rllm.session.%",
        name,
    ]
    for key in forged:
        with pytest.raises(GatewayError) as refused:
            authorize(f"Bearer {key}", "secret")
        assert refused.value.status == 401


@pytest.mark.parametrize(
    ("headers", "authorization"),
    [
        ({}, ""),
        ({b"x-api-key": b"rllm-a"}, "Bearer rllm-a"),
        ({b"authorization": b"Bearer rllm-b", b"x-api-key": b"rllm-a"}, "Bearer rllm-b"),
    ],
)
def test_key_may_be_in_the_header_of_anthropic_clients(headers, authorization):
    assert authorization_of(headers) == authorization
