"""What is wrong with a configuration, in one sentence of our own words.

What a key takes is read from the schema's JSON schema, so the words cannot fall behind the schema.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError

from sagecli.config import Config
from sagecli.errors import did_you_mean

Key = Sequence[str | int]
Node = dict[str, Any]
"""A part of the JSON schema."""


def explain(
    error: ValidationError, data: dict[str, Any], source: str, file_data: dict[str, Any], changed: Sequence[Key]
) -> str:
    """The first problem as "source: key = value; it takes ..." and how many more there are.

    data: what was validated; source: the file's name; file_data: the file alone; changed: the keys --set gave.
    Unknown keys come first, since they explain missing ones.
    """
    problems = _without_echoes(error.errors(include_url=False))
    first = min(problems, key=lambda problem: bool(problem["type"] != "extra_forbidden"))
    if _is_from_set(first, file_data, changed):
        source = "--set"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{source}: {_sentence(first, data)}{more}"


def _without_echoes(problems: list[Any]) -> list[Any]:
    """pydantic's problems, less "too short" for a list that lacks only the items it already complained about."""

    def is_echo(problem: Any) -> bool:
        length = len(problem["loc"])
        return problem["type"] == "too_short" and any(
            len(other["loc"]) > length and other["loc"][:length] == problem["loc"] for other in problems
        )

    return [problem for problem in problems if not is_echo(problem)]


def _is_from_set(problem: Any, file_data: dict[str, Any], changed: Sequence[Key]) -> bool:
    """Whether the file alone lacks the problem, or --set gave the very key."""
    key = tuple(_locate(problem["loc"])[0])
    if any(key[: len(given)] == tuple(given) for given in changed):
        return True
    try:
        Config.model_validate(file_data)
    except ValidationError as error:
        same = [(other["loc"], other["msg"]) for other in error.errors(include_url=False)]
        return (problem["loc"], problem["msg"]) not in same
    return True


def _sentence(problem: Any, data: dict[str, Any]) -> str:
    """One problem: the key, what was given and what is allowed."""
    kind, loc = problem["type"], list(problem["loc"])
    if kind == "extra_forbidden":
        return _unknown(loc)
    if kind == "value_error":  # a rule over several keys; its message begins with the first of them
        return ".".join([*(str(part) for part in _locate(loc)[0]), str(problem["ctx"]["error"])])
    if kind == "missing" and isinstance(loc[-1], int):  # a list of fixed length that is too short
        kind, loc = "too_short", loc[:-1]
    if loc[:-1] and "oneOf" in _locate(loc[:-1])[1]:  # the last part is a union's tag
        loc = loc[:-1]
    key, node = _locate(loc)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = node["discriminator"]["propertyName"]
        kind = "missing" if kind == "union_tag_not_found" else kind
        key, node = [*key, tag], {"enum": list(node["discriminator"]["mapping"])}
    if kind == "missing":
        return f"{_spell(key)} is missing; it takes {_allowed(node)}"
    given = _value(data, key)
    allowed = _allowed(node)
    if kind == "finite_number":
        allowed = allowed.replace("a number", "a finite number", 1)
    hint = did_you_mean(given, _choices(node)) if isinstance(given, str) else ""
    return f"{_spell(key)} = {_toml(given)}; it takes {allowed}{hint}"


def _unknown(loc: list[str | int]) -> str:
    """An unknown key, what its table has, and the nearest name: the same word elsewhere, or a similar one here."""
    above, node = _locate(loc[:-1])
    name, known = str(loc[-1]), list(node["properties"])
    same = [key for key in _all_keys(_schema()) if key.rsplit(".", 1)[-1] == name]
    hint = f"; did you mean {same[0]!r}?" if same else did_you_mean(name, known)
    table = f"[{_spell(above)}]" if above else "a configuration"
    if kind := node["properties"].get("kind", {}).get("const"):  # a variant: the key may belong to another one
        table += f' with kind = "{kind}"'
    return f"unknown key {_spell([*above, name])}; {table} has {', '.join(known)}{hint}"


@cache
def _schema() -> Node:
    return Config.model_json_schema()


def _resolve(node: Node) -> Node:
    """The node a reference stands for, or the node itself."""
    if "$ref" not in node:
        return node
    target: Node = _schema()["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return target


def _locate(loc: Sequence[str | int]) -> tuple[list[str | int], Node]:
    """The key that pydantic's location stands for, without the tags of unions, and its part of the schema."""
    key: list[str | int] = []
    node = _schema()
    for part in loc:
        if "oneOf" in node:
            node = _variant(node, str(part))
            continue
        key.append(part)
        if isinstance(part, int):
            node = _resolve(node["prefixItems"][part] if "prefixItems" in node else node["items"])
        else:
            others = node.get("additionalProperties") or {}
            node = _resolve(node.get("properties", {}).get(part, others))
    return key, node


def _variant(node: Node, tag: str) -> Node:
    """The variant of a union that a tag of pydantic's names: one kind of table, or one shape of value."""
    if "discriminator" in node:
        return _resolve({"$ref": node["discriminator"]["mapping"][tag]})
    shape = {"all": "string", "steps": "array", "window": "object"}[tag]
    return next(variant for variant in map(_resolve, node["oneOf"]) if variant["type"] == shape)


def _all_keys(node: Node, above: str = "") -> Iterator[str]:
    """Every key below a node, dotted, outermost first."""
    properties = {above + name: _resolve(child) for name, child in node.get("properties", {}).items()}
    yield from properties
    for name, child in properties.items():
        yield from _all_keys(child, f"{name}.")


def _choices(node: Node) -> list[str]:
    """The words a key takes, if it takes words."""
    variants = [node, *map(_resolve, node.get("oneOf", []))]
    words = [word for variant in variants for word in (*variant.get("enum", []), variant.get("const"))]
    return [word for word in words if isinstance(word, str)]


def _allowed(node: Node) -> str:
    """What a part of the schema takes, in words."""
    node = _resolve(node)
    if "discriminator" in node:
        return f"a table whose {node['discriminator']['propertyName']} is {_or(list(node['discriminator']['mapping']))}"
    if "oneOf" in node:
        return ", or ".join(_allowed(variant) for variant in node["oneOf"])
    if words := _choices(node):
        return _or(words)
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])} items, each {_allowed(node['prefixItems'][0])}"
    if "items" in node:
        return f"a list of {'one or more' if 'minItems' in node else 'any'} items, each {_allowed(node['items'])}"
    if "properties" in node:
        return f"a table of {', '.join(node['properties'])}"
    if node["type"] == "object":
        each = node["additionalProperties"]
        return "a table" if each is True else f"a table of one or more names, each with {_allowed(each)}"
    words_of = {"integer": "a whole number", "number": "a number", "string": "a text", "boolean": "true or false"}
    return words_of[node["type"]] + _range(node)


def _range(node: Node) -> str:
    """The limits of a number, as words to put after it."""
    if "maximum" in node:
        return f" from {node['minimum']:g} to {node['maximum']:g}"
    if "exclusiveMaximum" in node:
        return f" from {node['minimum']:g} to below {node['exclusiveMaximum']:g}"
    if "exclusiveMinimum" in node:
        return f" over {node['exclusiveMinimum']:g}"
    return f" of {node['minimum']:g} or more" if "minimum" in node else ""


def _or(words: list[str]) -> str:
    quoted = [f'"{word}"' for word in words]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def _spell(key: Key) -> str:
    """A key as a person writes it: reward.models[0].name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def _value(data: Any, key: Key) -> Any:
    for part in key:
        data = data[part]
    return data


def _toml(value: Any) -> str:
    """A value as it stands in a file, shortened where it is long."""
    if isinstance(value, dict):
        return "a table" if value else "{}"
    if isinstance(value, list):
        text = f"[{', '.join(map(_toml, value))}]"
    elif isinstance(value, bool | str):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
