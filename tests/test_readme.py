"""The README: its commands run as they stand, only smaller; what it computes is what the code computes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- run -->\n```(bash|python)\n(.*?)```", README, re.DOTALL)
TINY = ("tiny --training.steps 2 --training.batch-rows 4 --training.validation-rows 4 --training.compile off "
        "--shape.row-tokens 32 --shape.depth 4")  # fmt: skip
SMALLER = {
    "--vocab-size 32768": "--vocab-size 400",
    "--vocab-size 4096": "--vocab-size 400",
    "_small ": f"_{TINY} ",
    "_base ": f"_{TINY} ",
    "three_ml_tiny --data": f"three_ml_{TINY} --data",
    "--training.batch-rows 8 --training.learning-rate 1e-3 --training.max-seconds 180": "--training.learning-rate 1e-3",
    "--training.steps 1000": "--training.steps 3",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "latemask rank": "latemask rank --tokens 500",
}
"""The same command at a size for a test."""


def smaller(block: str) -> str:
    for long, short in SMALLER.items():
        block = block.replace(long, short)
    return block


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A folder with ``my-text/`` in it, as a stranger may have: Python's help topics, a file each."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("desk")
    (folder / "my-text").mkdir()
    for name, text in topics.items():
        (folder / "my-text" / f"{name}.txt").write_text(text, encoding="utf-8")
    (folder / "my-task").mkdir()
    rows = "".join(f"a {('bad', 'good')[number % 2]} film,{('low', 'high')[number % 2]}\n" for number in range(40))
    for name in ("train", "dev"):
        (folder / "my-task" / f"{name}.csv").write_text(f"review,mood\n{rows}")
    (folder / "my-task" / "alike.csv").write_text("a,b,score\none,one,5\none,two,1\na dog,a cat,2\n")
    (folder / "my-task" / "pairs.jsonl").write_text('{"right": "it is", "wrong": "it are"}\n')
    return folder


def run_block(kind: str, block: str, desk: Path) -> None:
    program = ["bash", "-euc", smaller(block)] if kind == "bash" else [sys.executable, "-c", block]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, cwd=desk, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_run_in_order(desk):
    assert [kind for kind, _ in BLOCKS].count("bash") >= 5
    for kind, block in BLOCKS:
        run_block(kind, block, desk)
    assert (desk / "report.html").is_file()
    for said in ("Minimal pairs", "Similarity", "mood"):
        assert said in (desk / "own.html").read_text()
    moods = [json.loads(path.read_text()) for path in (desk / "runs" / "own" / "downstream").glob("mood-*.json")]
    assert sorted(result["seed"] for result in moods) == [0, 0, 1]  # with and without --patience
    assert (desk / "out" / "own" / "model.safetensors").is_file()
    assert json.loads((desk / "runs" / "late" / "step-0000002" / "run.json").read_text())["masking"]["joins"] == [
        "0:0.0:0.2", "decoder:0.2:1.0"]  # fmt: skip


def test_every_command_of_the_readme_exists():
    from latemask.__main__ import COMMANDS

    named = set(re.findall(r"(?:^|`|-m )latemask ([a-z]+)", README, re.MULTILINE))
    assert named <= {command.name for command in COMMANDS}
    assert {"tokenizer", "prepare", "pretrain", "export", "fill", "rank", "report", "doctor", "cost"} <= named


def test_flags_of_the_readme_exist():
    """Each dotted flag is a field of the recipes; each other flag is in its command's help."""
    from latemask.config import replace
    from latemask.recipes import recipe

    run = recipe("mae_lm_small")
    for part, name in set(re.findall(r"--(shape|masking|decoder|training)\.([a-z-]+)", README)):
        name = name.replace("-", "_")
        replace(run, {f"{part}.{name}": getattr(getattr(run, part), name)})


def test_files_of_the_tree_exist():
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    folders: list[str] = []
    seen = 0
    for line in tree[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders = folders[:depth]
        assert (ROOT / "/".join([*folders, name])).exists(), name
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
        seen += 1
    assert seen > 40


@pytest.fixture
def docs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import refresh

    return refresh


def test_figure_and_costs_are_what_the_recipes_say(docs):
    costs, idea = docs.costs, docs.idea
    assert (ROOT / "docs" / "idea.svg").read_text(encoding="utf-8") == idea.drawing()
    assert json.loads(costs.RESULTS.read_text())["costs"] == json.loads(json.dumps(costs.costs()))
    assert docs.refreshed(README, {"costs": costs.markdown(costs.costs())}) == README
    assert docs.refreshed("a\n<!-- x -->\nold\n<!-- /x -->\nb", {"x": "new\n"}) == "a\n<!-- x -->\nnew\n<!-- /x -->\nb"


def test_exit_status_of_a_stopped_run_is_the_documented_one():
    from latemask.training.loop import PREEMPTED

    assert f"exit status {PREEMPTED}" in README


def test_pictures_and_files_that_are_named_are_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).is_file(), target


def gpu(folder: Path, *given: str, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    """scripts/gpu, called in ``folder``."""
    environment = os.environ | {"PYTHON": str(python)}
    return subprocess.run(
        [ROOT / "scripts" / "gpu", *given], capture_output=True, text=True, cwd=folder, env=environment
    )


@pytest.fixture
def has_gpu(tmp_path: Path) -> Path:
    """A folder with a program that finds a GPU as Python would, and says what else it is told to do; prepared text."""
    (tmp_path / "da ta [1]").mkdir()
    (tmp_path / "da ta [1]" / "store.json").touch()
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$@"\ncase "$*" in *lanes*) exit 3;; esac\n""")
    python.chmod(0o755)
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="then it runs for minutes")
def test_what_only_a_gpu_shows_is_refused_without_one(has_gpu: Path) -> None:
    done = gpu(has_gpu, "da ta [1]", "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert "found no CUDA GPU" in done.stderr
    assert not (has_gpu / "out").exists()


@pytest.mark.parametrize("python", ["nowhere/python", "no-such-program", "blank"])
def test_an_interpreter_without_latemask_is_no_lack_of_a_gpu(python: str, has_gpu: Path) -> None:
    (has_gpu / "blank").mkdir()
    (has_gpu / "blank" / "python").write_text("#!/bin/sh\nexit 1\n")
    (has_gpu / "blank" / "python").chmod(0o755)
    done = gpu(has_gpu, "da ta [1]", "out", python="blank/python" if python == "blank" else python)
    assert (done.returncode, done.stdout) == (2, "")
    assert "found no latemask" in done.stderr
    assert "CUDA" not in done.stderr
    assert not (has_gpu / "out").exists()


@pytest.mark.parametrize(("given", "said"), [
    (("da ta [1]",), "found 1 arguments"), (("python", "out"), "found no python/store.json"),
    (("da ta [1]", "python"), "found python, where nothing can be written"),
    (("da ta [1]", "python/out"), "found python/out, where nothing can be written"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_runs(given: tuple[str, ...], said: str, has_gpu: Path) -> None:
    done = gpu(has_gpu, *given, python="./python")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_what_only_a_gpu_shows_goes_where_the_caller_said(has_gpu: Path) -> None:
    """Everything is tried, also after what failed, and the files that it names are there."""
    done = gpu(has_gpu, "da ta [1]", "o ut/[x]", python="./python")
    assert done.returncode == 1
    found = re.findall(r"^(\w+): exit status (\d) ", done.stdout, re.MULTILINE)
    assert found == [(name, "3" if name == "lanes" else "0")
                     for name in ("kernels", "graphs", "lanes", "updates", "bias", "start")]  # fmt: skip
    logs = {name: (has_gpu / "o ut" / "[x]" / f"{name}.log").read_text() for name, _ in found}
    assert "--data da ta [1] --runs o ut/[x]/start" in logs["start"]
    programs = re.findall(r"\S+\.py", "".join(logs.values()))
    assert len(programs) == 6
    assert all(Path(program).is_file() for program in programs)
