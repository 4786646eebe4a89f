"""The share tau of the energy that an effective rank counts, as a user may give it. No torch."""

from __future__ import annotations

from latemask.errors import Refusal


def check_tau(tau: float) -> None:
    """Raise ``Refusal`` for what can be no share of the energy."""
    if not 0 < tau <= 1:
        raise Refusal("--tau", repr(tau), "more than 0, at most 1")
