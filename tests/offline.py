"""Processes without a network: every try to reach one, by them or by a process that they start, fails and is noted."""

from __future__ import annotations

import os
from pathlib import Path

HOOK = '''
"""Read by every Python process at its start."""
import os, socket, sys

FORBIDDEN = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}

def note(text):
    with open(os.environ["OFFLINE_NOTES"], "a") as file:
        file.write(" ".join([text, str(os.getpid()), *sys.orig_argv]).replace("\\n", " ") + "\\n")

def forbid(event, arguments):
    if event not in FORBIDDEN:
        return
    if isinstance(arguments[0], socket.SocketType) and arguments[0].family == socket.AF_UNIX:
        return
    note(f"tried {event}")
    raise OSError("the network is forbidden here")

sys.addaudithook(forbid)
note("started")
'''
UNSET = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
         "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE")  # fmt: skip
"""Nothing outside may be what keeps latemask from the network."""


class Offline:
    """``environment`` for processes that may reach no network; ``tries`` and ``starts`` are what they noted."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(HOOK)
        self.notes = folder / "notes.txt"
        names = {*UNSET, *(name.lower() for name in UNSET)}
        self.environment = {name: value for name, value in os.environ.items() if name not in names}
        path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment |= {"PYTHONPATH": os.pathsep.join(path), "OFFLINE_NOTES": str(self.notes),
                             "HF_HOME": str(folder / "empty"), "HOME": str(folder)}  # fmt: skip

    def _noted(self, kind: str) -> list[str]:
        return [line for line in self.notes.read_text().splitlines() if line.startswith(kind)]

    @property
    def tries(self) -> list[str]:
        return self._noted("tried")

    @property
    def starts(self) -> list[str]:
        return self._noted("started")
