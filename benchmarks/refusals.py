"""A program's refusal is told in a line, not as a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from latemask.errors import Refusal


def program(main: Callable[[], object]) -> None:
    """Run ``main``; exit with what it refuses, status 1."""
    try:
        main()
    except Refusal as refusal:
        sys.exit(str(refusal))
