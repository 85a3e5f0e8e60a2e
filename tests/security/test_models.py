"""An attacker writes the model folder: code in it never runs, and nobody is asked whether it may."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.inference.local.loading import load_model, load_tokenizer

CODE = "import pathlib\npathlib.Path({marker!r}).write_text('run')\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model folder whose every `auto_map` names a module that writes a file; `marker` is that file."""
    folder = tmp_path / "model"
    folder.mkdir()
    classes = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map = dict.fromkeys(classes, "planted.Planted")
    (folder / "planted.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    (folder / "config.json").write_text(json.dumps({"model_type": "planted", "auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": ["planted.Planted", None]}})
    )
    return folder


@pytest.mark.parametrize("load", [load_tokenizer, load_model, TokenPrompts.load])
def test_code_of_a_model_is_not_run_even_if_stdin_says_yes(
    hostile: Path, load: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ConfigError, match="auto_map"):
        load(str(hostile))
    assert "[y/N]" not in "".join(capsys.readouterr())
    assert not (hostile.parent / "marker").exists()


def test_code_runs_only_if_the_user_names_the_folder(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(hostile.parent / "modules"))
    monkeypatch.setenv("RLLM_TRUSTED_MODELS", f"{hostile.parent / 'another'}:owner/name")
    with pytest.raises(ConfigError, match="RLLM_TRUSTED_MODELS"):
        load_tokenizer(hostile)
    assert not (hostile.parent / "marker").exists()
    monkeypatch.setenv("RLLM_TRUSTED_MODELS", str(hostile))
    with pytest.raises(Exception, match="Planted"):  # the module runs, and has no such class
        load_tokenizer(hostile)
    assert (hostile.parent / "marker").exists()


class _Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch marker",)


def test_pickled_weights_run_nothing_and_are_named(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(policy_folder, folder)
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"weight": _Planted()}, file, protocol=2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="pickled"):
        load_model(folder)
    assert not (tmp_path / "marker").exists()
