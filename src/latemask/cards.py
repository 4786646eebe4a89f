"""What a GPU can do at best: dense bf16 peak and memory, from the makers' data sheets. No torch here."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from latemask.errors import Refusal


@dataclass(frozen=True)
class Card:
    """A GPU: dense bf16 peak in FLOP/s, memory in bytes (the makers' data sheets)."""

    name: str
    peak: float
    memory: float


CARDS = tuple(
    Card(name, tflops * 1e12, gigabytes * 1e9)
    for name, tflops, gigabytes in (
        ("H100 PCIe", 756, 80),
        ("H100", 989, 80),
        ("H200", 989, 141),
        ("B200", 2250, 180),
        ("A100", 312, 80),
        ("L40S", 362, 48),
        ("A10", 125, 24),
        ("L4", 121, 24),
        ("RTX 5090", 209.5, 32),
        ("RTX 4090", 165, 24),
        ("RTX 3090", 71, 24),
        ("MI300X", 1307, 192),
    )
)


def card(kind: str) -> Card:
    """A card by its short name, whatever its case, blanks and dashes. Raises ``Refusal`` listing the known ones."""
    for known in CARDS:
        if _squeezed(known.name) == _squeezed(kind):
            return known
    raise Refusal("--kind", repr(kind), f"one of {', '.join(known.name for known in CARDS)}")


def card_of_device(device_name: str) -> Card | None:
    """The card behind a driver's name, such as "NVIDIA H100 80GB HBM3"; None where it is not in the table."""
    words = re.split(r"[\s_-]+", device_name.lower())
    if "laptop" in words or "mig" in words:
        return None
    return next((known for known in CARDS if set(known.name.lower().split()) <= set(words)), None)


def _squeezed(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""What the drivers of NVIDIA's GPUs (on Linux, under Windows) and AMD's leave in a machine that has one."""


def has_gpu() -> bool:
    """Whether this machine seems to have a GPU, judged by its drivers, without torch."""
    is_apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return is_apple or any(Path(driver).exists() for driver in DRIVERS)


def recipe_for_here() -> tuple[str, str]:
    """The recipe to begin with, and its flags: what this machine trains in hours, not weeks. A tiny 3ML takes longer
    than a tiny MAE-LM: the output layer over half of the tokens costs it more than a decoder would."""
    return ("three_ml_small", " --shape.positions rotary") if has_gpu() else ("mae_lm_tiny", "")
