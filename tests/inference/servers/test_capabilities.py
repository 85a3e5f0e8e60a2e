"""Capabilities of servers of every kind, found by requests."""

from __future__ import annotations

from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.inference.servers.capabilities import Checks, Finding, check_trainable, probe

from ..endpoint import endpoint


def found(**abilities: Any) -> Checks:
    with endpoint(**abilities) as url:
        return probe(url)


def of(capabilities: Checks, name: str) -> Finding:
    [finding] = [finding for finding in capabilities.findings if finding.name == name]
    return finding


def test_all_capabilities_are_detected() -> None:
    capabilities = found()
    assert capabilities.ok
    assert {finding.name: finding.detail for finding in capabilities.findings} == {
        "models": "policy",
        "token ids": "2 ids, each with its log-probability",
        "streamed ids": "2 ids and 2 log-probabilities in 3 chunks, with the prompt's",
        "token-id prompts": "3 ids were taken as they are",
        "tools": "accepted",
        "n > 1": "2 answers to n=2",
        "kind of log-probabilities": "processed: at temperature 0.5 they differ 2.00 times as much as at 1",
        "new weights": "by transfer, while it runs",
    }
    assert not any(finding.fix for finding in capabilities.findings)
    assert capabilities.to_dict()["ok"] is True


@pytest.mark.parametrize(
    ("abilities", "name", "expected", "fix"),
    [
        ({"gives_ids": False}, "token ids", "token_ids", "vLLM 0.10.2 or newer"),
        ({"routes": []}, "new weights", "this server takes no new weights", "start it as `rllm doctor"),
        ({"models": []}, "models", "none", "--model NAME"),
    ],
)
def test_missing_required_capability_is_a_problem(
    abilities: dict[str, Any], name: str, expected: str, fix: str
) -> None:
    capabilities = found(**abilities)
    assert not capabilities.ok
    assert [finding.name for finding in capabilities.problems] == [name]
    assert expected in of(capabilities, name).detail
    assert fix in of(capabilities, name).fix


@pytest.mark.parametrize(
    ("abilities", "name", "expected", "fix"),
    [
        ({"streams_ids": False}, "streamed ids", "0 ids and 2 log-probabilities", "agents that stream"),
        ({"streams": False}, "streamed ids", "not supported with streaming", "agents that stream"),
        ({"takes_token_prompts": False}, "token-id prompts", "prompt must be a string", "fork"),
        ({"takes_tools": False}, "tools", "--enable-auto-tool-choice", "--tool-call-parser"),
        ({"num_choices": 1}, "n > 1", "1 answer to", "several calls"),
        (
            {"kind": "raw"},
            "kind of log-probabilities",
            "raw: at temperature 0.5 they differ 1.00",
            "rollout.temperature=1",
        ),
    ],
)
def test_missing_recommended_capability_is_not_a_problem(
    abilities: dict[str, Any], name: str, expected: str, fix: str
) -> None:
    capabilities = found(**abilities)
    assert capabilities.ok
    finding = of(capabilities, name)
    assert not finding.ok
    assert expected in finding.detail
    assert fix in finding.fix


def test_capabilities_of_sglang_are_detected() -> None:
    capabilities = found(routes=["/update_weights_from_disk"], ids_field="response_token_ids", streams=False)
    assert [finding.name for finding in capabilities.findings if not finding.ok] == ["streamed ids"]
    assert of(capabilities, "new weights").detail == "by disk, while it runs"


def test_raw_log_probabilities_suffice_only_at_temperature_one() -> None:
    with endpoint(kind="raw") as url:
        check_trainable(url, temperature=1.0)
        with pytest.raises(
            ConfigError, match=r"cannot be trained with:\n  kind of log-probabilities: raw: .*processed_logprobs"
        ):
            check_trainable(url, temperature=0.7)


def test_server_that_requires_a_key_is_called_with_it() -> None:
    with endpoint(key="secret") as url:
        assert "no key" in of(probe(url), "models").detail
        assert probe(url, api_key="secret").ok


def test_model_that_is_not_served_is_a_problem() -> None:
    with endpoint() as url:
        capabilities = probe(url, model="other")
    assert of(capabilities, "models").fix == "ask for one that it serves: --model policy"
    assert not capabilities.ok


def test_unreachable_server_is_reported() -> None:
    capabilities = probe("http://127.0.0.1:1/v1")
    assert [finding.name for finding in capabilities.problems] == ["models"]
    assert "cannot be reached" in capabilities.findings[0].detail
    with pytest.raises(ConfigError, match=r"vllm\.url"):
        probe("localhost:8000")
