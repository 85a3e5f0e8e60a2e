from rllm.trainer.checkup import Package, installed_packages, version_findings

TRAIN = {
    "torch": Package(version="2.13.0+cpu"),
    "transformers": Package(version="5.10.4", requires=["huggingface-hub<2.0,>=1.5.0", "sentencepiece; extra == 'all'"]),
    "peft": Package(version="0.21"),
    "safetensors": Package(version="0.8"),
    "huggingface-hub": Package(version="1.33.0"),
    "rllm": Package(version="0.1", requires=["orjson>=3.10", "verl<0.10,>=0.9.1; extra == 'verl'", "torch>=2.6; extra == 'train'"]),
    "orjson": Package(version="3.11"),
}  # fmt: skip


def findings_of(**changed: Package) -> list[tuple[bool, bool, str, str]]:
    packages = {**TRAIN, **{name.replace("_", "-"): package for name, package in changed.items()}}
    return [(item.ok, item.needed, item.detail, item.fix) for item in version_findings(packages)]


def test_compatible_versions_pass() -> None:
    assert findings_of() == [(True, True, "torch 2.13.0+cpu transformers 5.10.4 peft 0.21 safetensors 0.8", "")]


def test_incompatible_requirement_is_a_problem() -> None:
    assert findings_of(huggingface_hub=Package(version="2.4.0"))[1:] == [
        (
            False,
            True,
            "transformers 5.10.4 asks for huggingface-hub<2.0,>=1.5.0, and huggingface-hub 2.4.0 is installed",
            "pip install 'huggingface-hub<2.0,>=1.5.0'",
        )
    ]


def test_installed_packages_of_our_extras_must_fit() -> None:
    assert [expected for _, _, expected, _ in findings_of(verl=Package(version="0.8"))[1:]] == [
        "rllm 0.1 asks for verl<0.10,>=0.9.1, and verl 0.8 is installed"
    ]


def test_packages_used_by_some_runs_are_notes() -> None:
    assert findings_of(ray=Package(version="2.60", requires=["msgpack<2,>=1"]))[1:] == [
        (False, False, "ray 2.60 asks for msgpack<2,>=1, and msgpack is not installed", "pip install 'msgpack<2,>=1'")
    ]


def test_missing_training_packages_are_reported() -> None:
    found = version_findings({"rllm": Package(version="0.1")})
    assert [(item.ok, item.fix.partition(";")[0]) for item in found] == [(False, "pip install 'rllm[train]'")]


def test_installed_packages_pass() -> None:
    packages = installed_packages()
    assert packages["rllm"].version
    assert any(item.startswith("pydantic") for item in packages["rllm"].requires)
