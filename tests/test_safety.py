"""No pickle, no code from a model's folder, no archive, no network, and no tracker that asks."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offline import Offline
from samples import small
from trained import byte_level, write_run

PACKAGE = Path(__file__).parents[1] / "src" / "latemask"
FILES = sorted(PACKAGE.rglob("*.py"))

LOADERS_OF_CODE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "yaml", "code",
                   "runpy", "imp"}  # fmt: skip
"""Modules that turn bytes of a file into running code."""
ARCHIVES = {"tarfile", "zipfile", "zipimport"}
NETWORKS = {"urllib.request", "http", "ftplib", "smtplib", "requests", "httpx", "aiohttp", "urllib3", "websockets",
            "huggingface_hub", "xmlrpc"}  # fmt: skip
CALLS = {"eval", "exec", "__import__", "compile", "input", "breakpoint", "torch.load", "torch.save", "torch.hub.load",
         "os.system", "os.popen", "shutil.unpack_archive", "pd.read_pickle", "pandas.read_pickle"}  # fmt: skip
KEYWORDS = {"allow_pickle": False, "shell": False, "trust_remote_code": False}
"""Keywords that must be false wherever they are written, except where it is the user's own word."""
THE_USERS_WORD = {("hf/fresh.py", "trust_remote_code"): "trust"}
"""The check of an export runs in a process of its own, and runs code only where latemask has just written it."""
ASKS_THE_HUB = "hf/loading.py"
"""The one file that may ask the hub whether it is there: where a model is named, and no folder."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def faults(tree: ast.Module, name: str) -> Iterator[str]:
    """Every place of a file that could run what it reads, unpack it, or reach a network."""
    for node in ast.walk(tree):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in imported:
            if name == ASKS_THE_HUB and module.split(".")[0] == "huggingface_hub":
                continue
            if {module, module.split(".")[0]} & (LOADERS_OF_CODE | ARCHIVES | NETWORKS):
                yield f"{name}:{node.lineno} imports {module}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in CALLS or called.endswith((".extractall", ".load_module")):
            yield f"{name}:{node.lineno} calls {called}"
        if called in ("np.load", "numpy.load") and not any(word.arg == "allow_pickle" for word in node.keywords):
            yield f"{name}:{node.lineno} calls {called} without allow_pickle=False"
        for word in node.keywords:
            if word.arg in KEYWORDS and ast.unparse(word.value) not in (
                "False", THE_USERS_WORD.get((name, word.arg)),
            ):  # fmt: skip
                yield f"{name}:{node.lineno} passes {word.arg}={ast.unparse(word.value)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_is_run_unpacked_or_fetched(path):
    assert list(faults(ast.parse(path.read_text(encoding="utf-8")), name_of(path))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import yaml",
        "import tarfile",
        "from urllib.request import urlopen",
        "from urllib import request",
        "import huggingface_hub",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.save(x, path)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "archive.extractall(folder)",
        "subprocess.run(command, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=options.trust)",
    ],
)
def test_the_check_sees(source):
    assert list(faults(ast.parse(source), "a.py"))


def test_the_check_lets_pass():
    harmless = "from urllib.parse import quote\nimport socket\nmodel.eval()\nre.compile('a')\ntorch.compile(block)"
    assert list(faults(ast.parse(harmless), "a.py")) == []


def test_the_export_that_runs_code_is_the_one_that_was_just_written():
    """`trusts_code` reaches the fresh process only for latemask's own modelling file."""
    text = (PACKAGE / "hf" / "exporting.py").read_text(encoding="utf-8")
    [value] = [ast.unparse(word.value) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
               for word in node.keywords if word.arg == "trusts_code"]  # fmt: skip
    assert value == "has_code"


# --- network ----------------------------------------------------------------------------------------------------------


def test_the_ban_bites_in_children_too(tmp_path):
    offline = Offline(tmp_path)
    program = (
        "import socket, subprocess, sys\n"
        "unix = socket.socketpair(); unix[0].send(b'x')\n"
        "for reach in (lambda: socket.create_connection(('127.0.0.1', 9)),\n"
        "              lambda: socket.getaddrinfo('a.invalid', 80),\n"
        "              lambda: socket.socket().connect(('127.0.0.1', 9)),\n"
        "              lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))):\n"
        "    try: reach()\n"
        "    except OSError as error: assert 'forbidden' in str(error), error\n"
        "    else: raise SystemExit('reached')\n"
        "if len(sys.argv) == 1: subprocess.run([sys.executable, '-P', __file__, 'child'], check=True)\n"
    )
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, tmp_path / "program.py"], env=offline.environment, check=True)
    assert len(offline.starts) == 2
    assert len(offline.tries) == 8


def test_the_hub_is_asked_where_a_name_is_given_and_not_for_a_folder(tmp_path):
    offline = Offline(tmp_path / "hook")
    program = (
        "import os, sys\nfrom latemask.errors import Refusal\nfrom latemask.hf import load_encoder\n"
        "tries = lambda: sum(line.startswith('tried') for line in open(os.environ['OFFLINE_NOTES']))\n"
        "load_encoder(sys.argv[1]); assert tries() == 0\n"
        "try: load_encoder('nobody/nothing')\nexcept Refusal: assert tries() > 0\nelse: sys.exit('found')\n"
    )
    write_run(tmp_path / "run", small("mlm", positions="absolute"), byte_level())
    subprocess.run([sys.executable, "-c", program, tmp_path / "run"], env=offline.environment, check=True)


@pytest.mark.parametrize("command", [["doctor"], ["recipes"], ["cost", "mae_lm_base"]])
def test_commands_that_read_nothing_reach_no_network(command, tmp_path):
    offline = Offline(tmp_path)
    subprocess.run([sys.executable, "-m", "latemask", *command], env=offline.environment, check=True,
                   stdin=subprocess.DEVNULL, capture_output=True)  # fmt: skip
    assert offline.starts
    assert offline.tries == []


# --- trackers ---------------------------------------------------------------------------------------------------------

WANDB = """
import json, os, sys
class errors:
    class Error(Exception): pass
class Run:
    def log(self, numbers, step): pass
    def finish(self): pass
def login(prompt=True, verify=True):
    key = os.environ.get("WANDB_API_KEY") or os.environ.get("KEY_IN_NETRC")
    if not key and prompt:
        key = input("wandb: Enter your choice:")
    if key and verify:
        raise errors.Error("needs the network")
    return bool(key)
def init(mode, **settings):
    login(verify=False, prompt=mode == "online")
    if os.environ.get("BREAKS"):
        raise errors.Error("no such project")
    with open(os.environ["TOLD"], "w") as file:
        json.dump({"mode": mode, **settings}, file)
    return Run()
"""
PROGRAM = """
from pathlib import Path
import sys
from latemask.errors import Refusal
from latemask.training import journal
try:
    [tracker] = journal.listeners([sys.argv[1]], Path(sys.argv[2]), {"recipe": "x"})
    tracker.hear({"kind": "train", "step": 1, "loss": 2.0})
    tracker.close()
except Refusal as refusal:
    print(refusal)
"""


@pytest.mark.parametrize(
    ("variables", "mode", "refused"),
    [
        ({}, "offline", ""),
        ({"WANDB_API_KEY": "k"}, "online", ""),
        ({"KEY_IN_NETRC": "k"}, "online", ""),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline", ""),
        ({"WANDB_MODE": "disabled"}, "disabled", ""),
        ({"WANDB_MODE": "online"}, "", "wandb in mode online, without a login"),
        ({"WANDB_API_KEY": "k", "BREAKS": "1"}, "", "no such project"),
    ],
)
def test_wandb_never_asks(variables, mode, refused, tmp_path):
    """A stand-in that asks where the real one would; with standard input closed, asking would be an EOFError."""
    offline = Offline(tmp_path / "hook")
    (tmp_path / "hook" / "wandb.py").write_text(WANDB)
    environment = offline.environment | {"TOLD": str(tmp_path / "told.json")} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM, "wandb", tmp_path], env=environment, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert refused in done.stdout
    assert bool(done.stdout) == bool(refused)
    if mode:
        assert json.loads((tmp_path / "told.json").read_text())["mode"] == mode


@pytest.mark.parametrize(("tracker", "module"), [("wandb", "wandb"), ("tensorboard", "tensorboard")])
def test_a_tracker_that_is_not_there_is_a_refusal(tracker, module, tmp_path):
    hook = tmp_path / "hook"
    offline = Offline(hook)
    (hook / f"{module}.py").write_text(f"raise ModuleNotFoundError('{module}')")
    done = subprocess.run([sys.executable, "-c", PROGRAM, tracker, tmp_path], env=offline.environment, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, check=True)  # fmt: skip
    assert f"--tracker: found {tracker}, which is not installed; wanted pip install latemask[{tracker}]" in done.stdout
