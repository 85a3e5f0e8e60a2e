"""Arguments that a model writes as bare text, made JSON by the tool's schema: whether `5` is a number or text, only that says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""Constants as JSON has them, by how Python's or JSON's spelling looks in lower case."""
_MAX_PARTS = 100
"""Of one argument's schema, which are looked at for the types that it allows."""


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each tool's parameters; the tools are in the OpenAI format."""
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    return {
        str(item.get("name")): item["parameters"] for item in functions if isinstance(item.get("parameters"), Mapping)
    }


def arguments_json(written: Mapping[str, str], schema: Mapping[str, Any]) -> str:
    """The arguments as one JSON object; `schema` is that of all parameters."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    items = (f"{_quoted(key)}: {value_json(text, known.get(key), schema)}" for key, text in written.items())
    return f"{{{', '.join(items)}}}"


def value_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A value as JSON: the very text, where it is JSON of a type that the schema allows; else a string of the text.

    `root` is where the schema's references point to. A value without a type in its schema is a string; a fraction where an
    integer is wanted stays a number, and the tool says what is wrong with it.
    """
    types = {"number" if name == "integer" else name for name in _types(schema, root, set())}
    bare = text.strip()
    bare = _WORDS.get(bare.lower(), bare)
    return bare if _type_of_json(bare) in types else _quoted(text)


def _types(schema: Any, root: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Return the types that a schema allows, as far as it names them.

    `seen` has the ids of the parts that were looked at: references may go round in circles, and double on the way.
    """
    if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > _MAX_PARTS:
        return
    seen.add(id(schema))
    named = schema.get("type")
    yield from [named] if isinstance(named, str) else _listed(named)
    for value in [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        yield _type_of(value)
    for kind in ("anyOf", "oneOf", "allOf"):
        for option in _listed(schema.get(kind)):
            yield from _types(option, root, seen)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_at(root, reference), root, seen)


def _at(root: Mapping[str, Any], reference: str) -> Any:
    """What `#/$defs/Name` points to."""
    place: Any = root
    for key in reference.removeprefix("#/").split("/"):
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _type_of_json(text: str) -> str | None:
    """The type of a value written as JSON; `None` if it is no JSON, or a string, which is written bare."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(value, str) else _type_of(value)


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case None:
            return "null"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
