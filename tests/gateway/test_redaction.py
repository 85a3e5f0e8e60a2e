import json
import re
from dataclasses import replace

import pytest

from rllm.errors import ConfigError
from rllm.gateway.config import GatewayConfig
from rllm.gateway.redaction import load_redact

SECRET = "4111-1111"


def mask_numbers(trace):
    """What a user writes: every card number in every text becomes stars."""
    texts = {"messages": trace.messages, "response": trace.response}
    masked = re.sub(r"\d{4}-\d{4}", "****", json.dumps(texts))
    return replace(trace, **json.loads(masked))


def break_ids(trace):
    trace.response_ids[0] += 1
    return trace


def lose_logprobs(trace):
    return replace(trace, logprobs=trace.logprobs[:-1])


def rename(trace):
    return replace(trace, session_id="elsewhere")


def forget(trace):
    return None


def fail(trace):
    raise KeyError("no rule for this")


def redacting(serve, hook, **options):
    config = GatewayConfig(redact=hook, shutdown_timeout_s=1)
    return serve([f"your card is {SECRET}"], config=config, **options)


def ask(served, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": f"I have {SECRET}"}], **fields}
    return served.post(json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_the_store_has_the_redacted_texts_and_the_agent_the_real_ones(serve, upstream, stream):
    served = redacting(serve, mask_numbers, upstream=upstream)
    answer = ask(served, stream=stream)
    assert answer.status_code == 200
    if not stream:
        assert SECRET in answer.text
    (trace,) = served.store.by_session("s")
    assert trace.messages == [{"role": "user", "content": "I have ****"}]
    assert trace.response["content"] == "your card is ****"
    assert len(trace.response_ids) == len(trace.logprobs) == len(f"your card is {SECRET}") + 1
    assert SECRET not in served.http.get("/sessions/s/traces").text


def test_the_next_turn_goes_on_from_the_real_texts(serve):
    served = redacting(serve, mask_numbers)
    first = ask(served).json()["choices"][0]["message"]
    messages = [{"role": "user", "content": f"I have {SECRET}"}, first, {"role": "user", "content": "thanks"}]
    assert served.post(json={"model": "m", "messages": messages}).status_code == 200
    one, two = served.store.by_session("s")
    assert two.parent_id == one.id


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (break_ids, "it changed response_ids"),
        (lose_logprobs, "it changed logprobs"),
        (rename, "it changed session_id"),
        (forget, "it returned NoneType"),
        (fail, "KeyError: 'no rule for this'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_hook_that_fails_lets_no_text_into_the_store(serve, hook, problem, stream):
    served = redacting(serve, hook)
    answer = ask(served, stream=stream)
    assert problem in answer.text
    assert "redaction_failed" in answer.text
    (trace,) = served.store.by_session("s")
    assert SECRET not in json.dumps(trace.to_dict())
    assert "redaction hook failed" in trace.error


def test_calls_that_failed_are_redacted_too(serve):
    served = redacting(serve, mask_numbers, upstream="http")
    served.upstream.fault = "error"
    assert ask(served).status_code == 500
    (trace,) = served.store.by_session("s")
    assert trace.messages == [{"role": "user", "content": "I have ****"}]


def test_a_hook_is_found_by_its_name():
    assert load_redact("copy:copy").__name__ == "copy"


@pytest.mark.parametrize("path", ["copy", "no_such_module:f", "copy:no_such_name", "string:digits"])
def test_a_name_without_a_function_is_refused(path):
    with pytest.raises(ConfigError, match="redact="):
        load_redact(path)


def test_a_request_is_refused_for_what_it_asks_though_the_hook_fails(serve, caplog):
    served = redacting(serve, fail)
    refused = served.post(json={"model": "m"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "no rule for this" in caplog.text
    (trace,) = served.store.by_session("s")
    assert "redaction hook failed" in trace.error


def test_a_hook_that_fails_lets_nothing_that_an_agent_sent_into_the_log(serve, caplog):
    served = redacting(serve, fail)
    assert SECRET in served.post(json={"model": "m", "messages": [SECRET]}).json()["error"]["message"]
    assert "no rule for this" in caplog.text
    assert SECRET not in caplog.text
