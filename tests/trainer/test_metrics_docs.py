"""docs/metrics.md has every metric, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from rllm.trainer.run_health import signals

from .conftest import RunTrainer

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "metrics.md").read_text()
GROUPS = sorted({name.partition("/")[0] for name in re.findall(r"`([\w/@]+)`", TEXT) if "/" in name} - {"agent"})
DOCUMENTED = set(re.findall(rf"`((?:{'|'.join(GROUPS)})/[\w/@]+)`", TEXT))
WRITTEN = {
    name
    for package in ("algorithms", "backends", "compat", "engine", "rewards", "trainer")
    for path in (ROOT / "src" / "rllm" / package).rglob("*.py")
    for name in re.findall(rf'"((?:{"|".join(GROUPS)})/[\w/@{{}}]+)"', path.read_text())
}


def form(name: str) -> str:
    """Return the name with each variable part as `*`."""
    return re.sub(r"\{\w+\}|\b(NAME|REASON|K)\b", "*", name)


def is_documented(name: str) -> bool:
    return any(re.fullmatch(form(name_there).replace("*", r"[\w./-]+"), name) for name_there in DOCUMENTED)


def test_metrics_in_the_code_are_documented() -> None:
    assert len(WRITTEN) > 50
    families = {"rollout/part"}  # prefix of several metrics
    assert {name for name in WRITTEN - families if "{" not in name and not is_documented(name)} == set()


def test_documented_metrics_are_in_the_code() -> None:
    source = {form(name) for name in WRITTEN}
    made_up = {
        *(f"{name}{end}" for name in ("rollout/reward", "batch/advantage") for end in ("_p10", "_p90")),
        *(f"{name}/*" for name in ("rollout/reward", "rollout/part", "eval/reward", "eval/part")),
        *(f"{model}/{name}" for model in ("policy", "critic") for name in ("loss", "grad_norm")),
        *(f"eval/source/*/{name}" for name in ("reward", "accuracy", "share")),
        *(f"val/{name}" for name in ("pass@1", "pass@*", "*/pass@1")),
    }
    made_up |= {f"timing/{phase}_s" for phase in ("assemble", "update", "publish", "explain", "model", "env")}
    made_up |= {f"tokens/per_second_{name}" for name in ("rollout", "update")}
    made_up |= {f"critic/score/{name}" for name in ("mean", "max", "min")}
    made_up |= {f"eval/{name}" for name in ("agent/*", "rollout/num_calls", "timing/rollout_s")}
    parts = "weights gradients optimizer reference critic activations sampler_weights kv_cache"
    made_up |= {f"memory/{part}_gb" for part in parts.split()}
    made_up.add("policy/pg_clipfrac")  # verl's own
    assert {form(name) for name in DOCUMENTED} - source - made_up == set()


def test_metrics_of_a_run_are_documented(run_trainer: RunTrainer) -> None:
    lines = run_trainer(val=True).lines
    written = {name for line in lines for name in line} - {"step"}
    assert {"rollout/reward", "timing/explain_s", "eval/accuracy", "val/pass@1"} <= written
    assert {name for name in written if not is_documented(name)} == set()


def test_warnings_are_documented() -> None:
    page = (ROOT / "docs" / "howto" / "flat-reward.md").read_text()
    everything = {
        "batch/zero_variance": 1.0,
        "rollout/truncated": 1.0,
        "policy/ratio": 3.0,
        "policy/sampler_gap_mean": 1.0,
    }
    found = signals({**everything, "policy/entropy": 0.0, "rollout/accuracy": 0.0, "batch/num_groups": 1.0}, [])
    assert [name for name in (*found, "rewards_raise", "all_dropped") if f"| `{name}` |" not in page] == []
