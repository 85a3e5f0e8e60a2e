"""Installed packages that do not fit each other, by what their own metadata ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rllm.inference.servers.capabilities import Finding

NEEDED = ("rllm", "torch", "transformers", "tokenizers", "huggingface-hub", "peft")
"""Packages whose requirements must hold for training here."""
OTHERS = ("vllm", "verl", "ray")
"""Packages that only some runs use, and that people install beside versions they do not ask for."""
TO_TRAIN = ("torch", "transformers", "peft", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Package:
    """What is installed."""

    version: str
    requires: Sequence[str] = ()


def installed_packages() -> dict[str, Package]:
    """Every distribution of this environment, by its normal name; of two of a name that which is imported."""
    found: dict[str, Package] = {}
    for item in distributions():
        name = item.metadata["Name"]
        if name:
            found.setdefault(canonicalize_name(name), Package(version=item.version, requires=item.requires or ()))
    return found


def version_findings(packages: Mapping[str, Package]) -> list[Finding]:
    """What is installed for training; and each requirement that does not hold, with the command that mends it."""
    return [_for_training(packages), *(_conflict(packages, name) for name in _wrong(packages))]


def _for_training(packages: Mapping[str, Package]) -> Finding:
    there = [name for name in (*TO_TRAIN, *OTHERS) if name in packages]
    missing = [name for name in TO_TRAIN if name not in packages]
    said = " ".join(f"{name} {packages[name].version}" for name in there) or "none"
    if missing:
        return Finding(
            name="packages",
            ok=False,
            said=f"{said}; not installed: {', '.join(missing)}",
            fix="pip install 'rllm[train]'; the gateway and the SDK work without",
        )
    return Finding(name="packages", ok=True, said=said)


@dataclass(frozen=True, kw_only=True)
class _Wrong:
    owner: str
    requirement: Requirement


def _wrong(packages: Mapping[str, Package]) -> Iterator[_Wrong]:
    """Every requirement that does not hold. What an extra of ours asks for must be right, where it is installed."""
    for owner in (*NEEDED, *OTHERS):
        for requirement in map(Requirement, packages[owner].requires if owner in packages else ()):
            found = packages.get(canonicalize_name(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            wrong = found is None or not requirement.specifier.contains(found.version, prereleases=True)
            if wrong and (applies or (owner == "rllm" and found is not None)):
                yield _Wrong(owner=owner, requirement=requirement)


def _conflict(packages: Mapping[str, Package], wrong: _Wrong) -> Finding:
    name, wanted = wrong.requirement.name, f"{wrong.requirement.name}{wrong.requirement.specifier}"
    found = packages.get(canonicalize_name(name))
    here = f"{name} {found.version} is installed" if found else f"{name} is not installed"
    return Finding(
        name="versions",
        ok=False,
        said=f"{wrong.owner} {packages[wrong.owner].version} asks for {wanted}, and {here}",
        needed=wrong.owner in NEEDED,
        fix=f"pip install '{wanted}'",
    )
