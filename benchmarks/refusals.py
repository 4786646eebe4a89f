"""A program's refusal, and Ctrl-C, are told in a line, not as a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from latemask.errors import Refusal


def program(main: Callable[[], int | None]) -> None:
    """Run ``main`` and exit with the status that it returns; with what it refuses, status 1."""
    try:
        sys.exit(main())
    except Refusal as refusal:
        sys.exit(str(refusal))
    except KeyboardInterrupt:
        sys.exit("interrupted")
