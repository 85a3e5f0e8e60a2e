"""`rllm config`: every setting, what it means, and whether a file of them is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rllm.cli.options import OnlyJson


def config(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys, sections (optim, rollout.group_size) or words to show; or a YAML file to check.",
            metavar="KEY|FILE",
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[str, typer.Option(help="Whose settings to show under algorithm.")] = "grpo",
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="A JSON Schema of such files, for editors.")
    ] = False,
    as_json: OnlyJson = False,
) -> None:
    """Show every setting with its meaning and default, as a file to begin with; or check a file.

    For completion in an editor: rllm config --json-schema > rllm.schema.json
    """
    from rllm.errors import ConfigError

    words = what or []
    if json_schema:
        _print_schema()
    elif any(_names_file(word) for word in words):
        if len(words) > 1:
            raise ConfigError(f"{' '.join(words)!r}: name one file, or keys")
        _check(Path(words[0]), as_json=as_json)
    else:
        _show(words, algorithm, as_json=as_json)


def _names_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or Path(word).is_file()


def _print_schema() -> None:
    import json

    from rllm.algorithms import ALGORITHMS
    from rllm.config.reference import json_schema

    print(json.dumps(json_schema(ALGORITHMS), indent=2))


def _show(words: list[str], algorithm: str, *, as_json: bool) -> None:
    from dataclasses import asdict

    from rllm.algorithms import ALGORITHMS
    from rllm.cli.terminal import print_json
    from rllm.config.reference import HINT, as_yaml, matching, section_docs, settings
    from rllm.errors import ConfigError

    found = settings(ALGORITHMS, algorithm)
    if words:
        found = matching(found, words)
    if not found:
        raise ConfigError(
            f"no setting has {' or '.join(map(repr, words))} in its key or meaning: `rllm config` lists them all"
        )
    if as_json:
        print_json({"settings": [asdict(item) for item in found]})
        return
    docs = section_docs()
    print("" if words else f"{HINT}\n# {docs['']} These are the defaults; leave out what you do not change.\n")
    print(as_yaml(found, docs), end="")


def _check(path: Path, *, as_json: bool) -> None:
    from rllm.cli.terminal import print_json
    from rllm.tracking.about import flat
    from rllm.trainer.algorithm import check_roles, make_algorithm
    from rllm.trainer.config import load_config

    loaded = load_config(path)
    check_roles(loaded, make_algorithm(loaded))
    changed = dict(flat(loaded.model_dump(mode="json", exclude_defaults=True)))
    if as_json:
        print_json({"valid": True, "settings": changed})
        return
    print(f"{path} is right; it {'sets' if changed else 'changes nothing'}")
    for key, value in changed.items():
        print(f"  {key} = {value}")
