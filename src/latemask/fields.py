"""Fields of frozen dataclasses, checked against their annotations: ill-typed, unknown and missing ones are refused by
name."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from latemask.errors import Refusal


def require(holds: bool, where: str, found: object, wanted: str) -> None:
    """Raise ``Refusal`` naming the field ``where`` unless the rule ``holds``."""
    if not holds:
        raise Refusal(where, repr(found), wanted)


class Spelled(ABC):
    """A value that stands as one text in files and on the command line; ``str`` writes it, ``parse`` reads it."""

    example: ClassVar[str]
    metavar: ClassVar[str]

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """Raises ``Refusal`` for any other text."""


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def typed(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the annotated type ``hint``: JSON's lists become tuples, whole numbers floats, texts what is
    spelled.

    Raises ``Refusal`` naming ``where`` for anything ill-typed, unknown or missing.
    """
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if issubclass(hint, Spelled):
            require(isinstance(value, str), where, value, f"a text such as {hint.example!r}")
            return hint.parse(value)
        require(isinstance(value, dict), where, value, f"an object with the fields {', '.join(_hints(hint))}")
        hints = _hints(hint)
        prefix = f"{where}: " if where.endswith(".json") else f"{where}."
        for name in sorted(value.keys() - hints.keys()):
            raise Refusal(f"{prefix}{name}", "an unknown field", f"one of {', '.join(hints)}")
        for name in sorted(hints.keys() - value.keys() - getattr(hint, "_newer", frozenset())):
            raise Refusal(f"{prefix}{name}", "nothing", "this field")
        return hint(**{name: typed(hints[name], item, f"{prefix}{name}") for name, item in value.items()})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        require(value in arguments, where, value, " or ".join(map(str, arguments)))
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return typed(next(argument for argument in arguments if argument is not type(None)), value, where)
    if origin is tuple:
        require(isinstance(value, tuple | list), where, value, "a list")
        if arguments[-1] is Ellipsis:
            return tuple(typed(arguments[0], item, where) for item in value)
        require(len(value) == len(arguments), where, value, f"{len(arguments)} values")
        return tuple(typed(argument, item, where) for argument, item in zip(arguments, value, strict=True))
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        require(is_number and abs(value) <= sys.float_info.max, where, value, "a finite number")
        return float(value)
    require(type(value) is hint, where, value, {int: "a whole number", bool: "true or false", str: "a text"}[hint])
    return value


def dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON objects inside each other hold, by dotted name: ``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inside = {f"{name}.{leaf}": held for leaf, held in dotted(value).items()} if isinstance(value, dict) else {}
        found |= inside or {name: value}
    return found


class Typed:
    """Checks each field against its annotation, before the rules of the class."""

    _part = ""
    _newer = frozenset[str]()
    """Fields that older files lack: these mean the default."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, typed(hint, getattr(self, name), f"{self._part}{name}"))
