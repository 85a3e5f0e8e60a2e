"""An attacker writes the model folder: code in it never runs, and no prompt asks for permission."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import rllm
from rllm.errors import ConfigError
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.inference.local.loading import described, load_model, load_tokenizer
from rllm.parser.chat_template import ChatTemplate

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
def test_code_of_a_model_is_not_run_even_if_stdin_confirms(
    hostile: Path, load: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ConfigError, match="auto_map"):
        load(str(hostile))
    assert "[y/N]" not in "".join(capsys.readouterr())
    assert not (hostile.parent / "marker").exists()


def test_inspecting_a_model_configuration_runs_no_code(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    assert described(hostile) is None
    assert "[y/N]" not in "".join(capsys.readouterr())
    assert not (hostile.parent / "marker").exists()


def test_every_loader_of_transformers_sets_trust_remote_code() -> None:
    for path in Path(rllm.__file__).parent.rglob("*.py"):
        source = path.read_text()
        tree = ast.parse(source if ".from_pretrained" in source else "")
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            named = ast.unparse(call.func)
            if named.startswith("Auto") and named.endswith(".from_pretrained"):
                assert "trust_remote_code" in {keyword.arg for keyword in call.keywords}, f"{path}:{call.lineno}"


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


@pytest.mark.parametrize(
    "planted",
    [
        {"target_modules": "(([a-z_.0-9])+)+X"},
        {"target_modules": ".*" * 30 + "X"},
        {"rank_pattern": {"(a|[a-z_.0-9]*)*X": 4}},
        {"modules_to_save": ["([a-z_.0-9]+){2,}X"]},
        {"megatron_config": {"a": 1}, "megatron_core": "planted"},
    ],
)
def test_adapter_cannot_name_code_or_slow_patterns(
    policy_folder: Path, tmp_path: Path, planted: dict[str, object]
) -> None:
    pytest.importorskip("peft")
    harmless = {"peft_type": "LORA", "base_model_name_or_path": str(policy_folder), "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**harmless, **planted}))
    with pytest.raises(ConfigError, match=next(iter(planted)).partition("_")[0]):
        load_model(tmp_path)


class _Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch marker",)


def test_pickled_weights_are_rejected_without_running(
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


DOUBLED = "{% set ns = namespace(a=[1, 2]) %}{% for x in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
TEXT = "{% set ns = namespace(a='ab' * 1000) %}"
HOSTILE_TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops of a macro": "{% macro m() %}{% for b in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for a in range(99999) %}{{ m() }}{% endfor %}",
    "a recursive loop": DOUBLED + "{% for x in ns.a recursive %}{{ loop(x) if x is iterable }}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "doubled text": TEXT + "{% for x in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "added text": TEXT + "{% for x in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "printed twice": TEXT
    + "{% for x in range(60) %}{% set ns.b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = ns.b %}{% endfor %}",
    "repeated text": "{{ 'a' * 9999999999 }}",
    "repeated list": "{{ [0] * 9999999999 }}",
    "wide text": "{{ 'a'|center(9999999999) }}",
    "wide text by a method": "{{ 'a'.ljust(9999999999) }}",
    "wide text by a mapped filter": "{{ ['a']|map('center', 9999999999)|list }}",
    "a wide format": "{{ '%9999999999d' % 1 }}",
    "a wide format by a filter": "{{ '%9999999999d'|format(1) }}",
    "a wide format by a method": "{{ '{:9999999999}'.format(1) }}",
    "a format of many": TEXT + "{{ ('{0}' * 99999).format(ns.a * 1000) }}",
    "much text replaced": TEXT + "{{ (ns.a * 1000).replace('', ns.a * 1000) }}",
    "much text joined": TEXT + "{{ ([ns.a * 1000] * 99999)|join }}",
    "much text joined by a method": TEXT + "{{ ''.join([ns.a * 1000] * 99999) }}",
    "mapped text joined": TEXT + "{{ ([ns.a * 1000] * 99999)|map('string')|join }}",
    "shared lists as JSON": DOUBLED + "{{ ns.a|tojson }}",
    "shared lists as text": DOUBLED + "{{ ns.a|string }}",
    "shared lists printed": DOUBLED + "{{ ns.a }}",
    "shared lists compared": DOUBLED + "{% set b = ns.a %}" + DOUBLED + "{{ ns.a == b }}",
    "shared lists in a dict": DOUBLED + "{{ {'a': ns.a}.values() }}",
    "a number of a billion digits": "{{ 10 ** (10 ** 9) }}",
    "a number that is squared": "{% set ns = namespace(a=9) %}{% for x in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "long texts read again and again": TEXT
    + "{% set a = ns.a * 10000 %}{% for x in range(99999) %}{% if a|upper == a|lower %}{% endif %}{% endfor %}",
    "long texts cut again and again": TEXT
    + "{% set a = ns.a * 10000 %}{% for x in range(99999) %}{% set b = a[::-1] %}{% endfor %}",
    "words of Latin": "{{ lipsum(n=99999999) }}",
    "a time of any width": "{{ strftime_now('%250d' * 9999999) }}",
    "a text taken apart": "{{ ('\u4e2d' * 60000000)|list }}",
    "lists added up": "{{ ([[0] * 1000] * 20000)|sum(start=[]) }}",
    "letters replaced by texts": TEXT + "{{ ns.a.translate({97: ns.a * 1000}) }}",
    "a long word wrapped": TEXT + "{{ (ns.a * 1000)|wordwrap(1) }}",
    "a number with a base": TEXT + "{{ ('f' * 6000000)|int(base=16) }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("attack", HOSTILE_TEMPLATES)
def test_chat_template_is_limited(policy_folder: Path, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.parser.bounded_template.MAX_STEPS", 50_000)
    tokenizer = load_tokenizer(str(policy_folder)).tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages|length > 8 %}" + (
        HOSTILE_TEMPLATES[attack] + "{% endif %}"
    )
    if attack == "deep brackets":
        with pytest.raises(ConfigError):
            ChatTemplate(tokenizer).render_text([{"role": "user", "content": "hi"}])
        return
    template = ChatTemplate(tokenizer)
    assert template.render_text([{"role": "user", "content": "hi"}]) == "hi"
    with pytest.raises(ConfigError, match="chat template"):
        template.render_text([{"role": "user", "content": "hi"}] * 9)


def test_chat_template_of_megabytes_is_not_compiled(policy_folder: Path) -> None:
    tokenizer = load_tokenizer(str(policy_folder)).tokenizer
    tokenizer.chat_template = "{{ a }}" * 100_000
    with pytest.raises(ConfigError, match="characters"):
        ChatTemplate(tokenizer).render_text([{"role": "user", "content": "hi"}])
