from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rllm.algorithms.base import Algorithm
from rllm.algorithms.grpo import GRPO
from rllm.config.loading import layers_of, locating_errors
from rllm.config.reference import origins
from rllm.errors import ConfigError
from rllm.trainer.config import TrainConfig, load_config
from rllm.trainer.settings import make_algorithm


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"optim": {"lrr": 1e-5}}, "optim.lrr is not a setting; did you mean 'optim.lr'?"),
        ({"rollouts": {}}, "rollouts is not a setting; did you mean 'rollout'?"),
        ({"lr": 1e-5}, "lr is not a setting; did you mean 'critic.lr' or 'optim.lr'?"),
        ({"zzz": 1}, "zzz is not a setting; use one of algorithm, backend, critic"),
        ({"zz": {"a": 1, "b": {"c": 2}}}, "zz.a, zz.b.c are not settings; use one of algorithm, backend, critic"),
        ({"optim": {"lr": {"x": 1}}}, "optim.lr.x is not a setting; optim.lr is one, with one value"),
        ({"optim": {"lr": "fast"}}, "optim.lr='fast': input should be a valid number"),
        ({"optim": {"lr": -1}}, "optim.lr=-1: input should be greater than 0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr=nan: input should be"),
        ({"optim": 5}, "optim=5: this is a section, whose settings are autocast, beta1, "),
        (["algorithm=grpo"], "algorithm='grpo': input should be a valid dictionary; write it as algorithm.name=grpo"),
        (
            ["model=Qwen/Qwen3-0.6B"],
            "model='Qwen/Qwen3-0.6B': this is a section, whose settings are chat_template, device, ",
        ),
        (
            "model.path=Qwen/Qwen3-0.6B",
            "No such file or directory; a file of settings belongs here, and key=value into a list",
        ),
        ({"num_steps": True}, "num_steps=True: true and false are not valid values of this setting"),
        (["num_steps=true"], "num_steps=True: true and false are not valid values of this setting"),
        (["optim.lr=false"], "optim.lr=False: true and false are not valid values of this setting"),
        (["num_epochs=true"], "num_epochs=True: true and false are not valid values of this setting"),
        ({"num_steps": 0}, "num_steps=0: input should be greater than 0"),
        ({"eval": {"top_k": 0}}, "eval.top_k=0: use -1 (all tokens) or at least 1"),
        ({"model": {"dtype": "float16"}}, "model.dtype='float16': input should be 'auto', 'float32' or 'bfloat16'"),
        (["trackers=wandb"], "trackers='wandb': input should be a valid list; write it as [wandb]"),
        (
            ["resume=true"],
            "resume is not a setting; to resume a run, use AgentTrainer(..., resume=True) or rllm train --r",
        ),
        (["val=tasks.jsonl"], "val is not a setting; held-out tasks are given as AgentTrainer(..., val_dataset=...)"),
        (["optim_lr=1"], "optim_lr is not a setting; did you mean 'optim.lr'?"),
        (["run_dir="], "run_dir='': use a folder, or leave it out for runs/<time>"),
        ({"trackers": ["jsonl", 5]}, "trackers.1=5: input should be a valid string"),
        (["optim.lr"], "'optim.lr' has no value: use key=value"),
        (["=3"], "'=3' has no key: use key=value"),
        (["seed=99999999999999999999"], "seed=99999999999999999999: input should be less than 9223372036854775808"),
        (["seed.x=3", "seed.x.y=4"], "seed.x.y=4': 'x' is a value, not a section"),
    ],
)
def test_errors_name_the_value_and_the_remedy(source: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert message in str(caught.value)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"num_steps": 0, "seeed": 1, "optim": {"beta1": 1.0}})
    assert len(str(caught.value).splitlines()) == 3
    assert "ValidationError" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("0.5", 0.5),
        ("2", 2),
        ("true", True),
        ("null", None),
        ("[a, b]", ["a", "b"]),
        ("grpo", "grpo"),
        ("a:b", "a:b"),
        ("{", "{"),
    ],
)
def test_command_line_values_are_parsed_as_yaml(text: str, value: Any) -> None:
    assert load_config([f"algorithm.x={text}"]).algorithm == {"x": value}


def test_learning_rate_may_be_in_scientific_notation() -> None:
    assert load_config(["optim.lr=1e-5"]).optim.lr == 1e-5


def test_last_value_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\noptim: {lr: 0.5, beta1: 0.8}\n")
    config = load_config(path, ["optim.lr=1e-3", "seed=2", "seed=3"])
    assert (config.seed, config.optim.lr, config.optim.beta1) == (3, 1e-3, 0.8)
    assert load_config({"seed": 1}, ["seed=2"]).seed == 2
    assert load_config(["seed=1"], ["seed=2"]).seed == 2
    assert load_config(TrainConfig(seed=1), ["optim.lr=1"]).seed == 1


def test_duplicate_keys_are_reported_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    assert load_config(["seed=1", "optim.lr=1", "seed=1"], ["seed=2"]).seed == 2
    assert [record.getMessage() for record in caplog.records] == [
        "seed=1 and seed=2 are both given: the last one is used"
    ]


def test_scalar_in_place_of_a_section_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert load_config(["optim={lr: 3}", "optim.beta1=0.5"]).optim.lr == 3
    assert not caplog.records
    assert load_config(["optim.beta1=0.5", "optim={lr: 3}"]).optim.beta1 == 0.9
    assert "optim.beta1=0.5 and optim={lr: 3} are both given: the last one is used" in caplog.text


def test_config_object_is_accepted() -> None:
    config = TrainConfig(num_steps=7)
    config.optim.lr = 0.5
    config.eval.at_start = False
    assert load_config(config) == config
    assert load_config(config, ["rllm.workflow.n_parallel_tasks=3"]).rollout.max_concurrent == 3


def test_source_mapping_is_not_modified() -> None:
    source = {"optim": {"lr": 0.5}}
    load_config(source, ["optim.lr=0.1", "seed=4"])
    assert source == {"optim": {"lr": 0.5}}


def test_empty_source_gives_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load_config() == load_config({}) == load_config(tmp_path / "empty.yaml") == TrainConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "optim: {lr: 1",
            "run.yaml, line 1, column 14 is not valid YAML: while parsing a flow mapping, expected ',' or '}'",
        ),
        ("optim:\n  lr: 1\n lr: 2\n", "run.yaml, line 3, column 2 is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "run.yaml, line 2, column 1 is not valid YAML: expected a single document"),
        ("a: \0", "run.yaml is not valid YAML: unacceptable character"),
        ("a: &a {b: *a}", "is not valid YAML: an alias refers"),
        ("- a\n- b\n", "holds a list: use `key: value` lines"),
        ("seed: 1\noptim: {lr: 1}\nseed: 2\n", "run.yaml, line 3, column 1 is not valid YAML: seed is set twice"),
        ("optim: {lr: 1, lr: 1}\n", "lr is set twice"),
        ("model: {path: {{ folder }}}\n", "run.yaml, line 1, column 16 is not valid YAML: a key must be text"),
        ("seeed: 3\n", "run.yaml, line 1: seeed is not a setting; did you mean 'seed'?"),
        ("seed: 3\noptim.lr: 1\n", "run.yaml, line 2: optim.lr is not a setting; write it as `optim: {lr: ...}`"),
        ("optim: &optim\n  lr: fast\ncritic: *optim\n", "run.yaml, line 2: critic.lr='fast'"),
        ("trackers:\n- jsonl\n- 5\n", "run.yaml, line 1: trackers.1=5: input should be"),
        ("data: {train_batch_size: 0}\n", "run.yaml, line 1: data.train_batch_size, here tasks_per_step=0"),
        (None, "No such file"),
    ],
)
def test_invalid_yaml_is_reported(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert message in str(caught.value)


def test_yaml_in_another_encoding_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match=r"run\.yaml cannot be read: .*; save the file as UTF-8"):
        load_config(path)


def test_error_names_the_source_of_the_winning_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optim:\n  lr: 0.5\n")

    def outcome_of(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        return str(caught.value)

    assert outcome_of("optim.lr=fast").startswith("optim.lr='fast'")
    assert outcome_of("seed=x").startswith("seed='x'")
    monkeypatch.setenv("RLLM__OPTIM__LR", "slow")
    assert outcome_of().startswith("environment: optim.lr='slow'")


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("seed=3: no", "environment: seed=3: no"),
        ("algorithm.clip_lo is not a setting of grpo", "run.yaml, line 2: algorithm.clip_lo is not a setting of grpo"),
        ("optim.lr=1: no", "optim.lr=1: no"),
        ("model.path=None: no", "model.path=None: no"),
        ("algorithm='x': a section of several places", "algorithm='x': a section of several places"),
    ],
)
def test_later_error_names_the_source_of_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("algorithm:\n  clip_lo: 0.5\noptim: {lr: 1}\n")
    monkeypatch.setenv("RLLM__SEED", "3")
    with pytest.raises(ConfigError) as caught, locating_errors(layers_of("run.yaml", ["optim.lr=1"])):
        raise ConfigError(mistake)
    assert str(caught.value) == expected


def test_assignments_are_validated() -> None:
    config = TrainConfig()
    with pytest.raises(ValueError, match="greater than 0"):
        config.optim.lr = -1.0


@dataclass(frozen=True, kw_only=True)
class Centered(Algorithm):
    strength: float = 1.0


def test_algorithm_is_made_with_its_settings() -> None:
    assert make_algorithm(TrainConfig()) == GRPO()
    config = load_config(
        ["algorithm.normalize_std=false", "algorithm.clip_high=1", "algorithm.aggregation=seq-mean-token-sum"]
    )
    assert make_algorithm(config) == GRPO(normalize_std=False, clip_high=1.0, aggregation="seq-mean-token-sum")


def test_custom_algorithm_is_made_with_its_settings() -> None:
    config = load_config([f"algorithm.name={__name__}:Centered", "algorithm.strength=0.5", "rollout.group_size=1"])
    assert make_algorithm(config) == Centered(strength=0.5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=grp0"], "algorithm.name='grp0' is not known: did you mean 'grpo'?"),
        (["algorithm.name=collections:OrderedDict"], "is not an algorithm"),
        (["algorithm.nam=ppo"], "algorithm.nam is not a setting of grpo; did you mean 'algorithm.name'?"),
        (["algorithm.clip_lo=0.1"], "algorithm.clip_lo is not a setting of grpo; did you mean 'algorithm.clip_low'?"),
        (
            ["algorithm.epsilon=0.1"],
            "algorithm.epsilon is not a setting of grpo; use one of name, aggregation, clip_high, clip_low, correction",
        ),
        (["algorithm.clip_low=0"], "algorithm.clip_low=0.0: use a number above 0"),
        (["algorithm.clip_low=true"], "algorithm.clip_low=True: true and false are not valid values of this setting"),
        (["algorithm.clip_low=wide"], "algorithm.clip_low='wide': Input should be a valid number"),
        (["algorithm.aggregation=tokenmean"], "algorithm.aggregation='tokenmean': Input should be 'token-mean'"),
        (["rollout.group_size=1"], "rollout.group_size=1: grpo compares"),
    ],
)
def test_invalid_algorithm_is_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_algorithm(load_config(overrides))
    assert message in str(caught.value)


def test_text_settings_are_not_converted():
    config = load_config(["run_dir=runs/exp #3", "model.path=123", "model.device=cuda:1"])
    assert str(config.run_dir) == "runs/exp #3"
    assert config.model.path == "123"
    assert config.model.device == "cuda:1"
    assert load_config(["store=2025"]).store == "2025"
    assert load_config(["run_dir=null"]).run_dir is None


def test_non_configuration_is_rejected():
    with pytest.raises(ConfigError, match="config=3: use a mapping"):
        load_config(3)
    with pytest.raises(ConfigError, match="3 is not a setting"):
        load_config([3])


def test_later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\noptim: {lr: 0.1, beta1: 0.5}\nrollout: {group_size: 3}\n")
    monkeypatch.setenv("RLLM__OPTIM__LR", "0.2")
    monkeypatch.setenv("RLLM__ROLLOUT__GROUP_SIZE", "5")
    monkeypatch.setenv("RLLM__MODEL__PATH", "123")
    config = load_config(file, ["rollout.group_size=7"])
    assert (config.seed, config.optim.beta1, config.optim.lr, config.rollout.group_size) == (1, 0.5, 0.2, 7)
    assert config.model.path == "123"
    assert load_config(config) == config
    assert load_config(TrainConfig()) == TrainConfig(), "a finished configuration is not changed"
    monkeypatch.setenv("RLLM__OPTIM__RL", "0.2")
    with pytest.raises(ConfigError, match=r"optim\.rl is not a setting"):
        load_config()


def test_role_names_keep_their_case_in_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM__ROLES__Solver__WEIGHT", "0.5")
    monkeypatch.setenv("RLLM__roles__judge__trainable", "false")
    config = load_config()
    assert (config.roles["Solver"].weight, config.roles["judge"].trainable) == (0.5, False)


def test_every_setting_has_an_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\n")
    monkeypatch.setenv("RLLM__OPTIM__LR", "0.2")
    overrides = ["actor_rollout_ref.rollout.n=4", "algorithm.clip_high=0.3"]
    settings = origins(load_config(file, overrides), layers_of(file, overrides), {})
    found = {setting.key: (setting.value, setting.origin) for setting in settings}
    assert found["seed"] == (1, str(file))
    assert found["optim.lr"] == (0.2, "environment")
    assert found["rollout.group_size"] == (4, "key=value, as actor_rollout_ref.rollout.n")
    assert found["algorithm.clip_high"] == (0.3, "key=value")
    assert found["num_steps"] == (100, "default")


def test_setting_of_a_role_with_a_dot_has_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("roles:\n  my.judge:\n    weight: 0.5\n")
    found = {item.key: (item.value, item.origin) for item in origins(load_config(file), layers_of(file), {})}
    assert found["roles.my.judge.weight"] == (0.5, str(file))


def test_steps_computed_from_epochs_have_that_origin() -> None:
    config = load_config(["num_steps=7", "num_epochs=2"])
    found = {item.key: item.origin for item in origins(config, layers_of(["num_steps=7", "num_epochs=2"]), {})}
    assert (found["num_steps"], found["num_epochs"]) == ("num_epochs", "key=value")


def test_fixed_length_defaults_to_the_response_length() -> None:
    made = make_algorithm(load_config(["algorithm.name=dr_grpo", "rollout.max_tokens=64"]))
    assert (made.aggregation, made.fixed_length) == ("fixed-length", 64)
    assert make_algorithm(load_config(["algorithm.name=dr_grpo", "algorithm.fixed_length=9"])).fixed_length == 9
    with pytest.raises(ConfigError, match="fixed_length"):
        make_algorithm(load_config(["algorithm.name=dr_grpo"]))


@pytest.mark.parametrize("name", ["RLLM_OPTIM__LR", "RLLM_OPTIM_LR", "rllm__optim__lr"])
def test_misspelled_variable_is_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "0.5")
    assert load_config().optim.lr != 0.5
    [message] = caplog.messages
    assert name in message
    assert "RLLM__OPTIM__LR" in message


@pytest.mark.parametrize(
    "name",
    [
        "RLLM__OPTIM__LR", "RLLM_HOME", "RLLM_CACHE", "RLLM_STORE", "RLLM_UPSTREAM_API_KEY", "RLLM_VIEW_TOKEN", "RLLM_RAY_LOGS",
        "RLLM_GATEWAY_API_KEY", "OPTIM__LR",
    ],
)  # fmt: skip
def test_other_variables_are_not_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "0.5")
    load_config()
    assert caplog.messages == []
