"""What the attention kernels compile to on a Hopper GPU, without one: instructions of each loop, registers, spills.

    python benchmarks/instructions.py --out results/instructions.json

Triton and the ptxas and cuobjdump that come with it need no GPU to compile. A loop goes over the tiles of one program;
with a table there are three (far before, near, far after). Instructions a tile say what a kernel costs where they bind
it: four schedulers issue one each a cycle for a warp of theirs.

``--before`` puts the numbers of former kernels beside: a JSON of this program, run with their source on PYTHONPATH
(``TILES`` in it set to the present ones, since only equal tiles compare).
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from asked import asked, read
from refusals import program
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from latemask import console
from latemask.errors import Refusal, unreadable
from latemask.kernels import relative_attention, relative_triton
from latemask.writing import write_json

WHAT = "instructions of the attention kernels on sm_90a"
HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TILES = 8
SHORTEST_LOOP = 60
"""Instructions; shorter ones wait or copy."""
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)(.*?);", re.MULTILINE)
KERNELS = {"forward": "forward_kernel", "keys": "keys_kernel", "queries": "queries_kernel"}
POINTERS = {
    "fp32": ("TABLE", "LSE", "DELTA", "D_ENDS", "D_NEAR"),
    "i32": ("QUERY_SEATS", "KEY_SEATS", "NOISE", "HASH", "KEY_AT"),
    "bf16": ("Q", "K", "V", "OUT", "D_OUT", "D_Q", "D_K", "D_V", "D_SCORES"),
}


@dataclass(frozen=True)
class Options:
    """Compile the attention kernels for Hopper and count."""

    out: Path = Path("results/instructions.json")
    """The JSON."""
    head_width: int = 64
    """Of a head."""
    before: Path | None = None
    """A JSON of this program for former kernels, whose numbers stand beside those of the same kernel, kind and tile."""

    def __post_init__(self) -> None:
        if self.head_width not in relative_attention.HEAD_WIDTHS:
            raise Refusal("--head-width", str(self.head_width), f"one of {relative_attention.HEAD_WIDTHS}")


def source_of(kernel: str, drops: bool, has_table: bool, rows: int, columns: int, width: int) -> ASTSource:
    """A kernel in bf16 with aligned pointers and strides, without groups."""
    chosen = {"HAS_TABLE": has_table, "HAS_GROUPS": False, "DROPS": drops, "WIDTH": width, "UPCASTS": False,
              "ROWS": rows, "COLUMNS": columns, "TILES": TILES, "QUERY_GROUPS": None,
              "KEY_GROUPS": None}  # fmt: skip
    if not has_table:
        chosen |= dict.fromkeys(("TABLE", "QUERY_SEATS", "KEY_SEATS"))
    if not drops:
        chosen |= {"NOISE": None}
    kinds = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names}
    function = getattr(relative_triton, KERNELS[kernel])
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, name in enumerate(function.arg_names):
        if name in chosen:
            signature[name], constants[(place,)] = "constexpr", chosen[name]
            continue
        is_fraction = name in ("scale", "survivors", "score_scale")
        signature[name] = kinds.get(name, "fp32" if is_fraction else "i32")
        if name in kinds or re.fullmatch(r"[a-z]_[bhn]|token_stride|padded|padded_keys", name):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)


def assembled(ptx: str) -> tuple[str, str]:
    """What ptxas says of a kernel, and its machine code as text."""
    with tempfile.TemporaryDirectory() as aside:
        source, binary = Path(aside) / "kernel.ptx", Path(aside) / "kernel.cubin"
        source.write_text(ptx)
        command = [get_ptxas(HOPPER.arch).path, "-v", "--gpu-name=sm_90a", source, "-o", binary]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        dump = subprocess.run([TOOLS / "cuobjdump", "--dump-sass", binary], capture_output=True, text=True, check=True)
        return said, dump.stdout


def loops(code: str) -> list[Counter[str]]:
    """The instructions inside of each branch back, by kind, in the order of their ends."""
    found = [(int(at, 16), kind, rest) for at, kind, rest in INSTRUCTION.findall(code)]
    place = {at: number for number, (at, _, _) in enumerate(found)}
    bodies = []
    for end, (at, kind, rest) in enumerate(found):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if not kind.startswith("BRA") or target is None or int(target[1], 16) > at:
            continue
        start = place.get(int(target[1], 16), end)
        if end - start >= SHORTEST_LOOP:
            bodies.append(Counter(kind.split(".")[0] for _, kind, _ in found[start : end + 1]))
    return bodies


def compiled(kernel: str, kind: str, drops: bool, width: int) -> dict[str, Any]:
    """One kernel with the tile that is chosen for ``kind``: bare, drops or table."""
    rows, columns, warps, stages = relative_attention.TILES[kernel][kind]
    source = source_of(kernel, drops, kind == "table", rows, columns, width)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=HOPPER, options=options)
    said, code = assembled(made.asm["ptx"])
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    tile = {"queries": rows, "keys": columns, "stages": stages, "warps": warps}
    bodies = [{"instructions": body.total(), "by_kind": dict(body.most_common())} for body in loops(code)]
    return {"kernel": kernel, "kind": kind, "drops": drops, "tile": tile, "registers": int(registers[1]),
            "spilled_bytes": int(spilled[1]), "shared_bytes": made.metadata.shared, "loops": bodies}  # fmt: skip


def beside(found: list[dict[str, Any]], former: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``found``, with ``loops_before`` (instructions of each) and ``registers_before`` where ``former`` has the same
    kernel, kind and tile."""

    def key(one: dict[str, Any]) -> tuple[Any, ...]:
        return one["kernel"], one["kind"], one["drops"], tuple(sorted(one["tile"].items()))

    numbers = {key(one): {"loops_before": [body["instructions"] for body in one["loops"]],
                          "registers_before": one["registers"]} for one in former}  # fmt: skip
    return [one | numbers.get(key(one), {}) for one in found]


def kernels_of(path: Path, head_width: int) -> list[dict[str, Any]]:
    """What a JSON of this program says of each kernel.

    Raises ``Refusal`` where there is no such JSON, and for one of another head width.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal("--before", f"{path}: {unreadable(error)}", "a JSON of this program") from error
    if not isinstance(found, dict) or found.get("what") != WHAT:
        raise Refusal("--before", f"{path}, which is none", "a JSON of this program")
    if (width := found["settings"]["head_width"]) != head_width:
        raise Refusal("--before", f"{path} of heads {width} wide", f"{head_width}, as --head-width")
    return found["kernels"]


def main() -> None:
    options = read(Options)
    former = [] if options.before is None else kernels_of(options.before, options.head_width)
    cases = (("bare", False), ("drops", True), ("table", False), ("table", True))
    found = [compiled(kernel, kind, drops, options.head_width) for kernel in KERNELS for kind, drops in cases]
    found = beside(found, former)
    write_json(options.out, {"kind": "benchmark", "what": WHAT, "kernels": found, "settings": asked(options),
                             "versions": {"triton": triton.__version__}})  # fmt: skip
    columns = (
        "kernel",
        "kind",
        "dropout",
        "queries x keys",
        "stages",
        "registers",
        "spilled",
        "instructions of a tile",
        "before",
    )
    console.table("Attention kernels on sm_90a", columns,
                  [(one["kernel"], one["kind"], "yes" if one["drops"] else "no",
                    f"{one['tile']['queries']} x {one['tile']['keys']}", one["tile"]["stages"], one["registers"],
                    one["spilled_bytes"], ", ".join(str(body["instructions"]) for body in one["loops"]),
                    ", ".join(map(str, one.get("loops_before", ()))))
                   for one in found])  # fmt: skip


if __name__ == "__main__":
    program(main)
