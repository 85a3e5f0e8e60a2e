"""`rllm doctor`: its report, and its exit code."""

from __future__ import annotations

import json
import sys

from rllm import cli

from ..inference.endpoint import endpoint


def doctor(monkeypatch, capsys, *arguments):
    """Run `rllm doctor`, and return its exit code, stdout and stderr."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["rllm", "doctor", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    return code, *capsys.readouterr()


def test_suitable_server_passes(monkeypatch, capsys):
    with endpoint() as url:
        code, out, _ = doctor(monkeypatch, capsys, "--base-url", url)
    assert code == 0
    assert out.splitlines()[0] == f"{url} (policy)"
    assert "  ok    token ids                  2 ids, each with its log-probability" in out
    assert "fix:" not in out
    assert out.splitlines()[-1] == f"Train with: model.engine=vllm vllm.url={url}"


def test_unsuitable_server_fails_with_fixes(monkeypatch, capsys):
    with endpoint(gives_ids=False, takes_tools=False) as url:
        code, out, _ = doctor(monkeypatch, capsys, "--endpoint", url)
    assert code == 1
    assert "  lacks token ids" in out
    assert "        fix: use a server that returns token ids and log-probabilities" in out
    assert "  note  tools" in out
    assert "VLLM_SERVER_DEV_MODE=1" in out
    assert "vllm serve MODEL --served-model-name policy" in out


def test_json_report_for_programs(monkeypatch, capsys):
    with endpoint(key="secret", models=["a", "b"]) as url:
        code, out, err = doctor(monkeypatch, capsys, "--endpoint", url, "--model", "b", "--api-key", "secret", "--json")
    assert code == 0
    output = json.loads(out)
    assert (output["model"], output["ok"]) == ("b", True)
    assert {finding["name"]: finding["ok"] for finding in output["findings"]}["tools"] is True
    assert "token ids" in err


def test_non_server_address_fails(monkeypatch, capsys):
    code, _, err = doctor(monkeypatch, capsys, "--endpoint", "nowhere")
    assert code == 2
    assert "rllm doctor --base-url" in err


def test_this_machine_and_model_are_checked(monkeypatch, capsys, policy):
    code, out, _ = doctor(monkeypatch, capsys, "--model", str(policy), "--port", "0")
    assert code == 0, out
    assert out.splitlines()[-1] == "Ready to train."
    assert "  ok    chat template              append-only" in out
    assert "with model.lora_rank set, LoRA adapts" in out


def test_missing_model_is_reported_as_json(monkeypatch, capsys):
    code, out, err = doctor(monkeypatch, capsys, "--model", "./nowhere", "--json")
    output = json.loads(out)
    assert (code, output["ok"]) == (1, False)
    [problem] = [finding for finding in output["findings"] if finding["name"] == "model"]
    assert "no such folder" in problem["detail"]
    assert all(finding["ok"] or finding["fix"] for finding in output["findings"])
    assert "1 problem to fix before training." in err
