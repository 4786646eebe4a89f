"""Flags from dataclasses: a field is a flag, its default the default, its docstring the help (through tyro).

The fields of a Run become dotted flags (``--training.steps``) whose defaults are the recipe's own numbers. What tyro
fills are twins of the dataclasses whose rules are off, so that a broken rule is a ``Refusal`` like any other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import FlagConversionOff, FlagCreatePairsOff, Positional, Suppress
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from latemask.config import Run, replace
from latemask.errors import Refusal
from latemask.fields import Spelled
from latemask.recipes import of_the_size, recipe

T = TypeVar("T")

PARTS = ("shape", "decoder", "masking", "training")
FROM_DATA: tuple[str, ...] = ("specials", "vocabulary")
"""Fields that the data's tokenizer sets."""
MOST_NAMED = 3
"""Recipes that a refusal names."""
SEVERAL = {
    "--vary": "Each field that varies has a --vary of its own: --vary A=1,2 --vary B=3,4",
    "one MODEL": "One command for each model; `latemask report A B` puts several runs side by side",
    "one RECIPE": "One command for each recipe; `latemask recipes` puts all of them side by side",
    "one TEXT": "A text of several words stands in quotes",
}
"""What to do where more is given than a command takes."""

_registry = ConstructorRegistry()


@_registry.primitive_rule
def _spelled(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """A Join or a RateStep stays text here; ``replace`` reads it."""
    kind = info.type
    if not (isinstance(kind, type) and issubclass(kind, Spelled)):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.metavar,
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def parse(kind: type[T], arguments: Sequence[str], *, prog: str, positional: Sequence[str] = ()) -> T:
    """An instance of the dataclass ``kind``, whose fields ``positional`` are given without a flag.

    Unknown or ill-typed flags are printed, with close matches, and exit with status 2. Raises ``Refusal`` for an empty
    argument, which would else be the current folder, for one too many, and whatever ``kind`` raises.
    """
    marks = {name: (Positional, tyro.conf.arg(metavar=name.upper())) for name in positional}
    twin = _without_rules(kind, marks)
    return _read_from(_tyro(twin, arguments, prog, _places(twin)), kind)


def parse_run(
    kind: type[T], run: Run, arguments: Sequence[str], *, prog: str, takes: str = "flags alone"
) -> tuple[T, Run]:
    """``kind`` as in ``parse``, and ``run`` with its dotted fields changed. Raises ``Refusal`` where a rule breaks, for
    a flag of a part that the run has not, and for what is no flag, saying what the command ``takes``."""
    _refuse_missing_parts(run, arguments)
    from_data: dict[str, tuple[Any, ...]] = dict.fromkeys(FROM_DATA, (Suppress,))
    parts = {name: _read_from(part, _without_rules(type(part), from_data))
             for name in PARTS if (part := getattr(run, name)) is not None}  # fmt: skip
    fields = [(name, Annotated[type(part), FlagConversionOff], dataclasses.field(default=part))
              for name, part in parts.items()]  # fmt: skip
    options = _tyro(_dataclass_from(_without_rules(kind, {}), fields, {}), arguments, prog, takes)
    changes = {
        f"{name}.{field.name}": given
        for name, part in parts.items()
        for field in dataclasses.fields(part)
        if (given := getattr(getattr(options, name), field.name)) != getattr(part, field.name)
    }
    return _read_from(options, kind), replace(run, changes)


def _refuse_missing_parts(run: Run, arguments: Sequence[str]) -> None:
    """Raise ``Refusal`` for the first flag of a part that the run has not, naming some recipes of its size with one."""
    for part in (name for name in PARTS if getattr(run, name) is None):
        flags = [argument.partition("=")[0] for argument in arguments if argument.startswith(f"--{part}.")]
        if flags:
            having = [name for name in of_the_size(run.recipe) if getattr(recipe(name), part) is not None]
            such = f", such as {', '.join(having[:MOST_NAMED])}" if having else ""
            raise Refusal(flags[0], f"{run.recipe}, which has no {part}", f"a recipe with one{such}",
                          "`latemask recipes` lists all")  # fmt: skip


def parse_recipe(
    kind: type[T], arguments: Sequence[str], *, command: str, wanted: str, takes: str = "one RECIPE and flags"
) -> tuple[T, Run]:
    """``kind`` and a run from ``RECIPE [FLAGS...]``, as in ``parse_run``. Raises ``Refusal`` for a recipe that does not
    exist, and, saying what is ``wanted``, for none."""
    if not arguments or arguments[0].startswith("-"):
        parse(kind, arguments, prog=f"latemask {command} RECIPE")
        raise Refusal(command, "no recipe", wanted, "`latemask recipes` lists the recipes")
    name, *rest = arguments
    return parse_run(kind, recipe(name), rest, prog=f"latemask {command} {name}", takes=takes)


def _without_rules(kind: type[Any], marks: dict[str, tuple[Any, ...]]) -> type[Any]:
    """A twin of ``kind`` that holds any value, with tyro's marks on some of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    marked = [
        (field.name, Annotated[hints[field.name], *every], _same_default(field))
        for field in dataclasses.fields(kind)
        if (every := (*marks.get(field.name, ()), *_said_of_nothing(field, hints[field.name])))
    ]
    return _dataclass_from(kind, marked, {"__post_init__": lambda self: None})


def _said_of_nothing(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, ...]:
    """What the help says instead of an empty default."""
    if field.default in ("", ()):
        return (tyro.conf.arg(help_behavior_hint="(default: none)"),)
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    return (tyro.conf.arg(help_behavior_hint="(required)"),) if is_required and get_origin(plain) is tuple else ()


def _read_from(instance: Any, kind: type[T]) -> T:
    """A ``kind`` with the values of ``instance``, which has all of its fields."""
    return kind(**{field.name: getattr(instance, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


def _same_default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return dataclasses.field(default=field.default)


def _dataclass_from(kind: type[Any], fields: Sequence[tuple[str, Any, Any]], namespace: dict[str, Any]) -> type[Any]:
    frozen = kind.__dataclass_params__.frozen
    namespace = {"__doc__": kind.__doc__, **namespace}
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=frozen, kw_only=True,
                                        namespace=namespace)  # fmt: skip


def _places(kind: type[Any]) -> str:
    """What a command takes: its arguments without a flag, and flags."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated and Positional in hint.__metadata__:
            are_several = get_origin(get_args(hint)[0]) is tuple
            return f"all {name.upper()} in one place, and flags" if are_several else f"one {name.upper()} and flags"
    return "flags alone"


def _tyro(kind: Any, arguments: Sequence[str], prog: str, takes: str) -> Any:
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise Refusal(argument.rstrip("=") or before or "arguments", "an empty value", "a value",
                          "An unset variable of the shell?")  # fmt: skip
    read = functools.partial(tyro.cli, kind, args=list(arguments), prog=prog, config=(FlagCreatePairsOff,),
                             registry=_registry)  # fmt: skip
    options, unknown = read(return_unknown_args=True)
    if any(argument.startswith("-") for argument in unknown):
        return read()  # prints the unknown flags, with close ones, and exits
    if unknown:
        command = prog.removeprefix("latemask ").partition(" ")[0]
        do = next((do for place, do in SEVERAL.items() if place in takes), "")
        raise Refusal(command, f"{' '.join(unknown)} besides", takes, do)
    return options
