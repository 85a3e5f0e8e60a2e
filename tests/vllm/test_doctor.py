"""Capabilities of a real vLLM."""

from __future__ import annotations

import pytest

from rllm.inference.servers.capabilities import probe

from .conftest import VLLM

pytestmark = pytest.mark.vllm


def test_server_started_by_us_has_all_capabilities(vllm: VLLM) -> None:
    capabilities = probe(vllm.url)
    assert capabilities.model == "policy"
    assert [finding for finding in capabilities.findings if not finding.ok] == []
    answer = {finding.name: finding.detail for finding in capabilities.findings}
    assert answer["kind of log-probabilities"] == "processed: at temperature 0.5 they differ 2.00 times as much as at 1"
    assert answer["new weights"] == "by transfer, while it runs"


def test_model_that_is_not_served_is_a_problem(vllm: VLLM) -> None:
    capabilities = probe(vllm.url, model="other")
    assert [finding.fix for finding in capabilities.problems] == ["ask for one that it serves: --model policy"]
