"""`rllm config` shows the schema, and prints a valid configuration."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import yaml

from rllm.algorithms import ALGORITHMS
from rllm.config.reference import as_yaml, json_schema, matching, section_docs, settings
from rllm.config.yaml_file import leaves
from rllm.errors import ConfigError
from rllm.trainer.config import TrainConfig, load_config

ALL = settings(ALGORITHMS)
BY_KEY = {item.key: item for item in ALL}


def test_every_setting_has_a_default_and_a_meaning() -> None:
    defaults = {key: value for key, value in leaves(TrainConfig().model_dump(mode="json")) if value != {}}
    shown = {item.key: item.default for item in ALL if not item.optional and item.default != {}}
    assert shown == defaults
    assert not [item.key for item in ALL if not item.doc]
    assert len(BY_KEY) == len(ALL)


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("num_steps", "whole number > 0"),
        ("rollout.max_tokens", "whole number > 0 | null"),
        ("model.engine", "embedded | vllm"),
        ("eval.top_p", "number > 0.0 and <= 1.0 | null"),
        ("trackers", "list of text"),
        ("optim.autocast", "true | false"),
        ("run_dir", "path | null"),
        ("algorithm.kl_in", "loss | reward"),
        ("roles.NAME.weight", "number > 0"),
    ],
)
def test_allowed_values_are_stated(key: str, allowed: str) -> None:
    assert BY_KEY[key].allowed == allowed


def test_printed_file_sets_the_defaults() -> None:
    printed = as_yaml(ALL, section_docs())
    assert load_config(yaml.safe_load(printed)) == TrainConfig()
    assert re.search(
        r"Learning rate after the warm-up; None .*\[number > 0 \| null\]\n  lr: null\n", printed, re.DOTALL
    )


def test_values_are_not_wrapped_at_hyphens() -> None:
    assert not [line for line in as_yaml(ALL, section_docs()).splitlines() if "#" in line and line.endswith("-")]


def test_commented_out_lines_are_valid_settings() -> None:
    lines = as_yaml(
        [item for item in settings(ALGORITHMS, "ppo") if item.key.startswith("algorithm.")], section_docs()
    ).splitlines()
    wanted = yaml.safe_load(
        "\n".join(line.replace("# ", "", 1) for line in lines if "gae_lambda: " in line or "name: " in line)
    )
    assert wanted == {"name": "ppo", "gae_lambda": BY_PPO["algorithm.gae_lambda"].default}


BY_PPO = {item.key: item for item in settings(ALGORITHMS, "ppo")}


def test_unknown_algorithm_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name='grop'.*'grpo'"):
        settings(ALGORITHMS, "grop")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["optim.lr"], ["optim.lr"]),
        (["sft"], ["sft.train_on", "sft.tokenize_method", "sft.reward_threshold", "sft.best_per_task"]),
        (["seed", "project"], ["seed", "project"]),
        (["CUDA_VISIBLE_DEVICES"], ["vllm.devices"]),
        (["nothing of this kind"], []),
    ],
)
def test_settings_are_found_by_key_section_or_word(words: list[str], keys: list[str]) -> None:
    assert [item.key for item in matching(ALL, words)] == keys


def test_json_schema_accepts_the_same_settings() -> None:
    schema = json.loads(json.dumps(json_schema(ALGORITHMS)))
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema).is_valid
    assert check(yaml.safe_load(as_yaml(ALL, section_docs())))
    assert check({"algorithm": {"name": "ppo", "gae_lambda": 0.9}, "optim": {"lr": 1e-5}})
    assert not check({"optim": {"rl": 1e-5}})
    assert not check({"model": {"engine": "sglang"}})
    described = schema["$defs"]["OptimConfig"]["properties"]["lr"]["description"]
    assert described.startswith("Learning rate after the warm-up; None ")
    assert (
        schema["properties"]["algorithm"]["properties"]["clip_high"]["description"]
        == "Distance above 1 to which the ratio may rise."
    )
