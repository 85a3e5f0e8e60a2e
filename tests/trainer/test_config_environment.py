"""Settings in the environment, and variables that are almost some."""

from __future__ import annotations

import pytest

from rllm.trainer.config import load_config


@pytest.mark.parametrize("name", ["RLLM_OPTIM__LR", "RLLM_OPTIM_LR", "rllm__optim__lr"])
def test_a_variable_that_nobody_reads_is_told_how_it_is_spelt(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "0.5")
    assert load_config().optim.lr != 0.5
    assert caplog.messages == [f"{name} of the environment is no setting: for optim.lr it is RLLM__OPTIM__LR"]


@pytest.mark.parametrize(
    "name",
    [
        "RLLM__OPTIM__LR", "RLLM_HOME", "RLLM_CACHE", "RLLM_STORE", "RLLM_UPSTREAM_API_KEY", "RLLM_VIEW_TOKEN", "RLLM_RAY_LOGS",
        "RLLM_GATEWAY_API_KEY", "RLLM_GATEWAY_ADMIN_KEY", "OPTIM__LR",
    ],
)  # fmt: skip
def test_nothing_is_said_of_others(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "0.5")
    load_config()
    assert caplog.messages == []
