"""What a measurement was asked for, as its JSON keeps it: folders and files by their last name alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


def asked(options: Any) -> dict[str, Any]:
    """The fields of a dataclass of options, without what only the machine at hand means."""
    values = dataclasses.asdict(options)
    return {name: value.name if isinstance(value, Path) else value for name, value in values.items()}
