"""What a result says of the machine that it comes from: card, driver, versions."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def machine_of(device: torch.device) -> dict[str, Any]:
    """Card (or processor), driver (None without ``nvidia-smi``) and versions (None of what is not installed)."""
    import torch

    driver = None
    if device.type == "cuda" and (program := shutil.which("nvidia-smi")):
        asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")[0].strip() or None
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("latemask", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    return {"card": name, "driver": driver, "versions": versions}
