"""What a measurement is asked for: read from the command line, and as its JSON keeps it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from latemask.errors import Refusal
from latemask.writing import check_file

T = TypeVar("T")


def read(kind: type[T], arguments: Sequence[str] | None = None) -> T:
    """The dataclass ``kind`` from the command line. Raises ``Refusal`` where its ``out`` can be no file: before the
    measurement, not after it; and as ``each_once`` does."""
    options: Any = tyro.cli(kind, args=arguments)
    each_once(options)
    check_file(options.out)
    return options


def each_once(options: Any) -> None:
    """Raise ``Refusal`` where a field of ``options`` holds a value twice, which would be measured twice."""
    for name, value in vars(options).items():
        for one in value if isinstance(value, tuple) else ():
            if value.count(one) > 1:
                raise Refusal(f"--{name.replace('_', '-')}", f"{one} twice", "each once")


def counts(options: Any, *names: str) -> None:
    """Raise ``Refusal`` where a field of ``options`` that counts something, or one of several, is below 1, or where
    none is given of several. None is the program's own choice."""
    for name in names:
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if value == ():
            raise Refusal(flag, "nothing", "one or more")
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number < 1:
                raise Refusal(flag, str(number), "at least 1")


def words(options: Any, *names: str) -> None:
    """Raise ``Refusal`` where a field of ``options`` that holds a command's flags cannot be split as a shell does."""
    for name in names:
        try:
            shlex.split(getattr(options, name))
        except ValueError as error:
            found = f"{getattr(options, name)!r} ({error})"
            raise Refusal(f"--{name}", found, "flags as in a shell, each quotation closed") from None


def asked(options: Any) -> dict[str, Any]:
    """The fields of a dataclass of options, without what only the machine at hand means: folders and files by their
    last name alone."""
    values = dataclasses.asdict(options)
    return {name: value.name if isinstance(value, Path) else value for name, value in values.items()}
