"""Backbones and rewards by name: entry points, the built-in ones like any third party's."""

import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from sagecli.errors import UserError, did_you_mean

Kind = Literal["backends", "rewards"]


def names(kind: Kind) -> list[str]:
    """Every installed name of a kind."""
    return sorted(point.name for point in entry_points(group=f"sagecli.{kind}"))


def load(kind: Kind, name: str) -> Any:
    """The class that an installed package registers under the name; UserError where none does."""
    point: EntryPoint | None = next(iter(entry_points(group=f"sagecli.{kind}", name=name)), None)
    if point is None:
        known = names(kind)
        raise UserError(f"no {kind[:-1]} is called {name!r}; installed: {', '.join(known)}{did_you_mean(name, known)}")
    return point.load()


def option_names(plugin: type) -> list[str]:
    """What its constructor takes."""
    return list(_options(plugin))


def defaults(plugin: type) -> dict[str, Any]:
    """Those of its options that have a default, and that default."""
    return {option: default for option, (_, default) in _options(plugin).items() if default is not ...}


def construct(kind: Kind, name: str, options: dict[str, Any]) -> Any:
    """The named class with its options, whose names and types are those of its constructor; UserError otherwise."""
    plugin = load(kind, name)
    known = _options(plugin)
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise UserError(f"the {kind[:-1]} {name!r} has no option {option!r}; {has}{did_you_mean(option, known)}")
    schema: Any = create_model(name, __config__=ConfigDict(strict=True, protected_namespaces=()), **known)
    try:
        checked = schema(**options)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        option, reason = ".".join(map(str, problem["loc"])), problem["msg"]
        given = "" if problem["type"] == "missing" else f" = {problem['input']!r}"
        raise UserError(f"the {kind[:-1]} {name!r}: {option}{given}: {reason[0].lower() + reason[1:]}") from None
    return plugin(**{option: getattr(checked, option) for option in options})


def _options(plugin: Any) -> dict[str, Any]:
    """The constructor's parameters as pydantic's fields: name -> (type, default)."""
    if plugin.__init__ is object.__init__:
        return {}
    types = get_type_hints(plugin.__init__, include_extras=True)
    parameters = list(inspect.signature(plugin.__init__).parameters.values())[1:]
    return {
        parameter.name: (
            types.get(parameter.name, Any),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
