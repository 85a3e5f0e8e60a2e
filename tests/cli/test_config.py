"""`rllm config`: output for people, and validation of a file."""

from __future__ import annotations

import json

import yaml

from rllm.trainer.config import TrainConfig, load_config

from .conftest import here


def test_whole_configuration_is_a_valid_settings_file(tmp_path):
    done = here("config", cwd=tmp_path)
    assert done.stdout.startswith("# yaml-language-server: $schema=rllm.schema.json\n")
    (tmp_path / "rllm.yaml").write_text(done.stdout)
    assert load_config(tmp_path / "rllm.yaml") == TrainConfig()
    assert here("config", "rllm.yaml", cwd=tmp_path).stdout == "rllm.yaml is valid; it changes nothing\n"


def test_part_of_the_configuration_is_printed(tmp_path):
    done = here("config", "rollout.group_size", cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == [
        "  # Rollouts of each task in a training step. [whole number > 0]",
        "  group_size: 8",
    ]
    output = json.loads(here("config", "rollout.group_size", "--json", cwd=tmp_path).stdout)
    assert [item["key"] for item in output["settings"]] == ["rollout.group_size"]


def test_valid_file_passes_validation(tmp_path):
    (tmp_path / "rllm.yaml").write_text(yaml.safe_dump({"optim": {"lr": 1e-5}, "algorithm": {"name": "rloo"}}))
    done = here("config", "rllm.yaml", cwd=tmp_path)
    assert done.stdout == "rllm.yaml is valid; it sets\n  algorithm.name = rloo\n  optim.lr = 1e-05\n"


def test_invalid_file_fails_validation(work, fails):
    (work / "rllm.yaml").write_text("optim:\n  lrr: 1\n")
    code, errors = fails("config", "rllm.yaml")
    assert (code, errors) == (2, "rllm: rllm.yaml, line 2: optim.lrr is not a setting; did you mean 'optim.lr'?\n")
    (work / "rllm.yaml").write_text("algorithm:\n  clip_high: -1\n")
    assert "clip_high" in fails("config", "rllm.yaml")[1]
    (work / "rllm.yaml").write_text("optim:\n  lr: 1\n lr: 2\n")
    assert "line 3, column" in fails("config", "rllm.yaml")[1]
    assert "No such file" in fails("config", "nowhere.yaml")[1]


def test_unknown_words_are_rejected(fails, work):
    code, errors = fails("config", "zzz")
    assert code == 2
    assert "no setting has 'zzz'" in errors


def test_json_schema_is_printed(tmp_path):
    assert json.loads(here("config", "--json-schema", cwd=tmp_path).stdout)["title"] == "rllm"
