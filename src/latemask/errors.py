"""What a user gave cannot be used: one exception, one form.

Every error that reaches a person says where (file, line or field), what was found, what was wanted and, where it
helps, what to do. The command line prints it without a traceback and exits with status 2. What reading a file raises is
put in words here too: no name of Python's tells a person what is wrong with it.
"""

import json
from typing import Any


class Refusal(ValueError):
    """Input, a setting or a file that latemask will not work with.

    ``where``: file, ``file:line`` or dotted field. ``found`` and ``wanted``: short phrases. ``do``: the next step.
    """

    def __init__(self, where: object, found: str, wanted: str, do: str = ""):
        where, found = (" ".join(text.split("\n")).strip() for text in (str(where), found))  # libraries speak in lines
        self.where, self.found, self.wanted, self.do = where, found, wanted, do
        super().__init__(f"{where}: found {found}; wanted {wanted}" + (f". {do}" if do else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.where, self.found, self.wanted, self.do)


def unreadable(error: Exception) -> str:
    """What is wrong with a file, from what reading it, or taking its fields, raised."""
    match error:
        case FileNotFoundError():
            return "no such file"
        case OSError():
            return f"a file that cannot be read ({error.strerror or error})"
        case UnicodeDecodeError():
            return f"bytes that are not UTF-8 (from byte {error.start:,} on)"
        case json.JSONDecodeError():
            place = f"line {error.lineno} " if "\n" in error.doc.strip() else ""
            return f"broken JSON ({error.msg}, {place}column {error.colno if place else error.pos + 1})"
        case RecursionError():
            return "JSON nested too deeply"
        case KeyError():
            return f"no field {error.args[0]}"
        case OverflowError():
            return "a number that is not finite"
        case TypeError() | AttributeError():
            return "a field that is of another kind"
        case ValueError() if "integer string conversion" in str(error):
            return "JSON with a number of too many digits"
        case ValueError() if "invalid literal" in str(error) or "could not convert" in str(error):
            return "a field that is of another kind"
    return str(error)


def kind_of(value: Any) -> str:
    """What a value from JSON is, as its readers call it; tables of the hub hold other kinds too."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null",
             int: "a number", float: "a number"}  # fmt: skip
    return kinds.get(type(value), "a value of another kind")
