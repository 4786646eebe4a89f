"""Out of memory, on a device or the host: what says so, and the one line that a person gets for it."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

from latemask.errors import Refusal

OF_HOST = ("can't allocate memory", "cannot allocate memory", "cpuallocator")
TOLD = (*OF_HOST, "out of memory", "alloc_failed")
"""How torch, cuBLAS, cuDNN and the compiler say it where the kind of error does not."""


class OutOfMemory(Refusal):
    """What was asked takes more memory than a device or the host has."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host had too little memory, whoever of torch, NumPy, cuBLAS, the compiler and the system says
    so."""
    if isinstance(error, OSError):  # its text may hold a file's name
        return error.errno == errno.ENOMEM
    is_known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, without torch
    return is_known or (isinstance(error, RuntimeError) and any(words in str(error).lower() for words in TOLD))


@contextlib.contextmanager
def out_of_memory_is_refused(where: str, instead: str = "", work: str = "") -> Iterator[None]:
    """The error of a device or the host that is out of memory as an ``OutOfMemory`` at ``where``, a command or a field.

    ``instead``: what helps where no memory can be freed; by default what no flag is needed for. ``work``: for what
    there was too little, such as "for 4 rows at once".
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        place, numbers = _place(error)
        found = " ".join(filter(None, ("too little memory", work, f"on {place}", numbers)))
        hidden = "hide the GPU with CUDA_VISIBLE_DEVICES= to run on the CPU" if place != "the host" else "ask for less"
        raise OutOfMemory(where, found, "what fits", f"Free memory there, or {instead or hidden}") from error


def lower(*flags: tuple[str, int | None, int]) -> str:
    """What to do, for ``instead``: lower the flags in this order. Each is given with its value (None: a default) and
    its least one, at which it is left out."""
    lowered = [flag if value is None else f"{flag} ({value:,})" for flag, value, least in flags
               if value is None or value > least]  # fmt: skip
    return f"lower {', then '.join(lowered)}" if lowered else "take a smaller model"


def _place(error: Exception) -> tuple[str, str]:
    """Where memory is short, and what is free and held there, as far as it is known: of a CUDA device whose number the
    error says, or which is the only one."""
    said = str(error)
    if isinstance(error, MemoryError | OSError) or any(words in said.lower() for words in OF_HOST):
        return "the host", ""
    import torch  # which has said so

    cuda = torch.cuda.is_initialized()
    if numbered := re.search(r"GPU (\d+) has", said):
        number = int(numbered[1])
    elif cuda and torch.cuda.device_count() == 1:
        number = 0
    else:
        return "the GPU", ""
    numbers = ""
    with contextlib.suppress(RuntimeError):  # a device that cannot even say it
        if cuda:
            free, total, held = (*torch.cuda.mem_get_info(number), torch.cuda.memory_reserved(number))
            numbers = f"({free / 1e9:.1f} of {total / 1e9:.1f} GB free, {held / 1e9:.1f} GB held by this process)"
    return f"cuda:{number}", numbers
