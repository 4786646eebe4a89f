"""Text preparation: ``latemask prepare`` against ``datasets`` as the stock run_mlm script of transformers uses it.

    python benchmarks/prepare.py corpus/*.jsonl.zst --tokenizer tok/ [--json results/prepare.json]

The other side loads the same files with ``load_dataset``, maps the same tokenizer over them in batches, and
concatenates and cuts to rows of 512 in a second map, on the same number of processes. Each side runs in a fresh process
with an empty folder for all it writes. Measured: wall seconds, CPU seconds of the process and its children, the largest
memory of the whole process tree (private + its share of shared pages, sampled ten times a second), and the bytes on
disk when done and at most.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
from disk import folder_bytes
from refusals import program

ROW_TOKENS = 512


def latemask(files: list[str], tokenizer: str, folder: Path, workers: int) -> None:
    """Ours."""
    from latemask.text.prepare import prepare

    prepare(files, tokenizer, folder / "out", valid_share=0.01, workers=workers)


def stock(files: list[str], tokenizer: str, folder: Path, workers: int) -> None:
    """``datasets`` with the steps of run_mlm, line_by_line off."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=f"{tokenizer}/tokenizer.json")
    raw = load_dataset("json", data_files=files, split="train", cache_dir=str(folder))

    def tokenize(batch: dict[str, list]) -> dict:
        return fast(batch["text"], return_special_tokens_mask=True)

    def cut(batch: dict[str, list]) -> dict[str, list]:
        rows = {}
        for name, lists in batch.items():
            joined = list(itertools.chain.from_iterable(lists))
            rows[name] = [joined[i : i + ROW_TOKENS] for i in range(0, len(joined) - ROW_TOKENS + 1, ROW_TOKENS)]
        return rows

    tokenized = raw.map(tokenize, batched=True, num_proc=workers, remove_columns=raw.column_names)
    rows = tokenized.map(cut, batched=True, num_proc=workers)
    print(len(rows), "rows", rows.column_names)


SIDES = {"latemask": latemask, "datasets": stock}


def measure(side: str, files: list[str], tokenizer: str, workers: int, scratch: Path) -> dict[str, float]:
    """Run one side in a fresh process and watch it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{side}-", dir=scratch))
    command = [sys.executable, __file__, *files, "--tokenizer", tokenizer, "--workers", str(workers)]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    load = os.getloadavg()[0]
    running = subprocess.Popen([*command, "--side", side, "--folder", str(folder)], stdout=subprocess.DEVNULL)
    watched, memory, disk = psutil.Process(running.pid), 0, 0
    for tick in itertools.count():
        if running.poll() is not None:
            break
        memory = max(memory, tree_bytes(watched))
        if tick % 10 == 0:
            disk = max(disk, folder_bytes(folder))
        time.sleep(0.1)
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if running.returncode:
        raise SystemExit(f"{side} ended with {running.returncode}")
    kept = folder_bytes(folder)
    shutil.rmtree(folder)
    return {
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_memory_bytes": memory,
        "disk_bytes": kept,
        "peak_disk_bytes": max(disk, kept),
        "load_before": load,
    }


def tree_bytes(process: psutil.Process) -> int:
    """Memory of a process and all below it, shared pages shared out."""
    total = 0
    for one in [process, *children(process)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def children(process: psutil.Process) -> list[psutil.Process]:
    """All processes below this one; none where it just ended."""
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def text_bytes(files: list[str]) -> int:
    """UTF-8 bytes of all documents."""
    from latemask.text.blocks import Reading, blocks
    from latemask.text.corpus import read_block
    from latemask.text.files import find

    reading = Reading()
    return sum(read_block(block, reading)[1].text_bytes for file in find(files) for block in blocks(file, reading))


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    """Measure both sides in turn, print and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help=".jsonl files, plain or compressed")
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes; all cores")
    parser.add_argument("--repeats", type=int, default=1, help="how often each side runs; medians are compared")
    parser.add_argument("--json", default="results/prepare.json", help="where the numbers go")
    parser.add_argument("--scratch", default=None, help="folder for what both sides write")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        SIDES[given.side](given.files, given.tokenizer, given.folder, given.workers)
        return

    from latemask.writing import check_file, write_json

    check_file(Path(given.json), "--json")
    text = text_bytes(given.files)
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(given.repeats):
            for side, found in runs.items():
                found.append(measure(side, given.files, given.tokenizer, given.workers, Path(scratch)))
                print(side, json.dumps(found[-1]), flush=True)
    median = {
        side: {name: statistics.median(run[name] for run in found) for name in found[0]} for side, found in runs.items()
    }
    for numbers in median.values():
        numbers["megabytes_per_second"] = text / 1e6 / numbers["seconds"]
        numbers["megabytes_per_cpu_second"] = text / 1e6 / numbers["cpu_seconds"]
    ours, theirs = median["latemask"], median["datasets"]
    packages = ("latemask", "tokenizers", "datasets", "transformers", "pyarrow", "numpy")
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "workers": given.workers,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "files": [Path(file).name for file in given.files],
        "text_bytes": text,
        "median": median,
        "ratios": {
            "times_faster": theirs["seconds"] / ours["seconds"],
            "times_less_cpu": theirs["cpu_seconds"] / ours["cpu_seconds"],
            "times_less_memory": theirs["peak_memory_bytes"] / ours["peak_memory_bytes"],
            "times_less_disk": theirs["disk_bytes"] / ours["disk_bytes"],
        },
        "runs": runs,
    }
    write_json(Path(given.json), result)
    print(json.dumps({"median": median, "ratios": result["ratios"]}, indent=1))


if __name__ == "__main__":
    program(main)
