"""The tables of docs/models.md, made of the results of the tests of this folder.

RLLM_TEMPLATES=.templates python -m tests.models.table
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .architectures import ARCHITECTURES, Architecture
from .survey import survey

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def architectures() -> str:
    """Return the table of architectures: those of one kind that are sampled and trained alike share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in ARCHITECTURES.values():
        rows.setdefault((each.kind, *_ways(each)), []).append(f"`{each.model_type}`{each.name[len(each.model_type) :]}")
    head = ["layers", "architectures (`model_type`)", "loads and samples here", "trains here", "with LoRA"]
    return _table(head, [[kind, ", ".join(names), *ways] for (kind, *ways), names in rows.items()])


def _ways(each: Architecture) -> list[str]:
    if each.is_refused:
        return ["refused: needs `mamba-ssm`, and so CUDA"] + ["no"] * 2
    sampled = "together, prefixes shared" if each.is_batched else "one by one"
    return [sampled, "as a prefix tree" if each.is_tree else "one sequence at a time", "yes"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["--"] * len(head), *rows])


ARCHITECTURES_OF = {
    "Command A": ("cohere2", "cohere2_moe"),
    "Command R, Aya": ("cohere", "cohere2"),
    "DeepSeek R1": ("deepseek_v3", "qwen2", "llama"),
    "DeepSeek V3.1": ("deepseek_v3",),
    "DeepSeek V3.2, V4": ("deepseek_v4",),
    "Falcon-H1": ("falcon_h1",),
    "Gemma 1, 2": ("gemma", "gemma2"),
    "Gemma 3": ("gemma3_text", "gemma3n_text"),
    "Gemma 4": ("gemma4_text",),
    "GLM 4.5 to 4.7": ("glm4_moe", "glm4_moe_lite"),
    "gpt-oss": ("gpt_oss",),
    "Granite 3.3": ("granite", "granitemoe"),
    "Granite 4": ("granitemoehybrid",),
    "Hunyuan": ("hunyuan_v1_dense", "hunyuan_v1_moe"),
    "Kimi K2": ("deepseek_v3",),
    "LFM2, LFM2.5": ("lfm2", "lfm2_moe"),
    "Llama 3.0": ("llama",),
    "Llama 3.1 to 3.3": ("llama", "llama tied"),
    "Llama 4": ("llama4_text",),
    "LLaVA-NeXT": ("mistral", "llama"),
    "MiniMax M2": ("minimax_m2",),
    "Mistral, first tools": ("mistral", "mistral with a window"),
    "Mistral, 2025": ("mistral", "ministral3"),
    "Nemotron Nano 2": ("nemotron_h",),
    "Nemotron 3": ("nemotron_h",),
    "Phi 3, 3.5": ("phi3", "phimoe"),
    "Phi 4": ("phi3",),
    "Qwen2.5": ("qwen2", "qwen2 tied"),
    "Qwen3": ("qwen3", "qwen3 tied", "qwen3_moe", "qwen3_next"),
    "Qwen3-Coder": ("qwen3_moe", "qwen3_next"),
    "Qwen3.5 to 3.8": ("qwen3_5_text", "qwen3_5_moe_text"),
    "Seed-OSS": ("seed_oss",),
    "SmolLM3": ("smollm3",),
    "SmolVLM, Idefics 3": ("llama",),
}
"""Architectures of each family of templates; missing families have none that was tested."""


def families() -> str:
    """Return the table of families: templates of one with the same properties share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in survey():
        calls = f"`{each.tool_format}`" if each.tool_format else "none"
        calls += "" if each.reads_calls or not each.tool_format else ", not all read"
        facts = (each.family, calls, "yes" if each.exact_turns else "no", each.reason)
        rows.setdefault(facts, []).append(each.template)
    head = ["family", "templates", "tool format", "exact turns", "remarks", "loads and trains here"]
    return _table(
        head,
        [
            [family, ", ".join(map(_code, names)), calls, turns, re.sub(r"'(.*?)'", _quoted, why), _runs(family)]
            for (family, calls, turns, why), names in rows.items()
        ],
    )


def _runs(family: str) -> str:
    """Return whether the family's architectures run here, each named if they differ."""
    known = {ARCHITECTURES[name].model_type: ARCHITECTURES[name] for name in ARCHITECTURES_OF.get(family, ())}
    runs = {name: "no" if each.is_refused else "yes" for name, each in known.items()}
    return ", ".join(f"{_code(name)} {answer}" for name, answer in runs.items()) or "not tried"


def _code(text: str) -> str:
    return f"`{text}`"


def _quoted(match: re.Match[str]) -> str:
    return _code(match[1].replace("|", "\\|"))


TABLES = {"architectures": architectures, "families": families}


def with_tables(page: str, names: Iterable[str] = TABLES) -> str:
    """Return the page with these tables between their marks."""
    for name in names:
        begin, end = (f"<!-- {word} of {name} -->\n" for word in ("begin", "end"))
        table = TABLES[name]()
        page = re.sub(f"(?<={begin}).*(?={end})", lambda _, table=table: table, page, flags=re.DOTALL)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
