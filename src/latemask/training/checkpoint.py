"""A step folder on disk: written aside, synced, renamed; whole or not there.

``step-0012000/`` holds ``encoder.safetensors`` (what is kept), ``rest.safetensors`` (what is thrown away),
``optimizer.safetensors``, ``tokenizer.json``, ``run.json`` (the only source for rebuilding it) and ``state.json``
(where the data stands, every file's SHA-256, and its own). torch is imported where tensors are read or written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from latemask import console
from latemask.config import Run, typed
from latemask.errors import Refusal, kind_of, unreadable
from latemask.training.journal import JOURNAL
from latemask.writing import file_checksum, folder_of, json_checksum, remove, write_whole, written_aside

if TYPE_CHECKING:
    from torch import Tensor, nn

    from latemask.model.encoder import Encoder
    from latemask.model.pretrainer import Pretrainer

ENCODER, REST, OPTIMIZER = "encoder.safetensors", "rest.safetensors", "optimizer.safetensors"
RUN, STATE, TOKENIZER = "run.json", "state.json", "tokenizer.json"
CHECKED = {ENCODER, REST, OPTIMIZER, RUN, TOKENIZER}
NAMED_RUNS = 3


@dataclass(frozen=True)
class State:
    """All that a resumed run needs besides tensors. ``batch_index`` and ``updates`` differ by the skipped updates."""

    batch_index: int = 0
    """The next batch to take."""
    updates: int = 0
    """Updates made: the step."""
    skips_in_a_row: int = 0
    """Updates skipped since the last one made."""
    seconds: float = 0.0
    """Training time so far; validation, saving and compiling left out."""
    best_loss: float | None = None
    """Lowest validation loss of the steps that were saved, nats per masked token."""
    best_step: int = 0
    """The step that had it."""
    loss_sum: float = 0.0
    """Of the updates since the journal's last line of training, but for one that a signal's stop left."""
    loss_steps: int = 0
    """How many they are."""
    micro_rows: int = 0
    """Rows in a forward pass, which dropout depends on."""
    processes: int = 0
    """How many trained together."""
    validation_due: bool = False
    """Whether a signal broke this step's validation off: who goes on makes it first."""
    data: str = ""
    """Folder of the prepared data."""
    data_fingerprint: str = ""
    """Of tokenizer and token stream: a run resumes on the same data only."""


def step_name(step: int) -> str:
    return f"step-{step:07d}"


def step_number(folder: Path) -> int | None:
    """The step of a step folder by its name; None for anything else."""
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match[1]) if match else None


def steps(run_folder: Path) -> list[Path]:
    """Step folders in numeric order, whole or not."""
    inside = run_folder.iterdir() if run_folder.is_dir() else ()
    found = [folder for folder in inside if step_number(folder) is not None and folder.is_dir()]
    return sorted(found, key=lambda folder: step_number(folder) or 0)


def fault(step: Path, read: Set[str] = CHECKED) -> str | None:
    """What is wrong with a step folder's files (those of ``read`` against their checksums); None: they are whole."""
    try:
        content = json.loads((step / STATE).read_text())
        if not isinstance(content, dict):
            return f"{STATE} is {kind_of(content)}, no JSON object"
        if content.pop("checksum") != json_checksum(content):
            return f"{STATE} differs from its checksum"
        if content["files"].keys() != CHECKED:
            return f"{STATE} has checksums of {', '.join(content['files'])}"
        for name, digest in content["files"].items():
            if name in read and file_checksum(step / name) != digest:
                return f"{name} differs from its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        return f"{STATE} cannot be used: {unreadable(error)}"
    return None


def model_fault(step: Path) -> str | None:
    """The same for who reads the model alone: the optimizer's state, two thirds of the folder, may be gone."""
    return fault(step, CHECKED if (step / OPTIMIZER).exists() else CHECKED - {OPTIMIZER})


def newest(run_folder: Path, passed_over: list[str] | None = None, fault: Callable[[Path], str | None] = fault) -> Path:
    """The newest whole step folder; what was passed over, and why, is added to ``passed_over``.

    Raises ``Refusal`` where there is none.
    """
    broken = []
    for step in reversed(steps(run_folder)):
        problem = fault(step)
        if problem is None:
            if passed_over is not None:
                passed_over.extend(broken)
            return step
        broken.append(f"{step.name}: {problem}")
    raise Refusal(run_folder, "; ".join(broken) or "no step folder", "a run folder with a whole checkpoint",
                  runs_below(run_folder))  # fmt: skip


def runs_below(folder: Path) -> str:
    """What to do where a folder of run folders was given for a run: some of them by name; empty where it holds none."""
    runs = sorted({step.parent for step in folder.glob("*/step-*") if step_number(step) is not None and step.is_dir()})
    if not runs:
        return ""
    others = f" and {len(runs) - NAMED_RUNS} more" if len(runs) > NAMED_RUNS else ""
    return f"Runs in it: {', '.join(map(str, runs[:NAMED_RUNS]))}{others}"


def resolve(folder: Path | str, *, takes_older: bool = True) -> Path:
    """A run folder's newest step whose model is whole, with a warning of what was passed over; a step folder is itself.

    Raises ``Refusal`` for anything else, and, unless ``takes_older``, where the newest step is not whole.
    """
    folder = Path(folder)
    if (folder / RUN).is_file():
        if problem := model_fault(folder):
            raise Refusal(folder, problem, "a whole checkpoint")
        return folder
    passed_over: list[str] = []
    step = newest(folder, passed_over, model_fault)
    if passed_over and not takes_older:
        raise Refusal(folder, "; ".join(passed_over), "its newest checkpoint whole",
                      f"To take the newest whole one name it: {step}")  # fmt: skip
    for problem in passed_over:
        console.warn_once(f"{folder}: passed over {problem}; {step.name} is read instead")
    return step


def write(
    run_folder: Path,
    run: Run,
    state: State,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    tokenizer: bytes,
) -> Path:
    """Write the step folder of ``state.updates``; where it stands, only its state: skipped updates change no tensor.

    Raises ``Refusal`` where the disk is full; nothing of the attempt is left then.
    """
    from safetensors.torch import save_file

    final = run_folder / step_name(state.updates)
    if final.exists():
        write_whole(final / STATE, _state_text(state, json.loads((final / STATE).read_text())["files"]))
        return final
    with written_aside(final) as aside:
        encoder, rest = _split(weights)
        save_file(encoder, aside / ENCODER)
        save_file(rest, aside / REST)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in optimizer.items()}, aside / OPTIMIZER)
        (aside / RUN).write_text(run.to_json())
        (aside / TOKENIZER).write_bytes(tokenizer)
        (aside / STATE).write_text(_state_text(state, {name: file_checksum(aside / name) for name in sorted(CHECKED)}))
    return final


def _state_text(state: State, files: dict[str, str]) -> str:
    content = {**dataclasses.asdict(state), "files": files}
    return json.dumps({**content, "checksum": json_checksum(content)}, indent=2) + "\n"


def prune(run_folder: Path, keep: int, best_step: int) -> None:
    """Delete all step folders but step 0, the best and the newest ``keep`` (0: keep all)."""
    for step in steps(run_folder)[:-keep] if keep else []:
        if step_number(step) not in (0, best_step):
            doomed = run_folder / f".{step.name}.deleted"
            os.rename(step, doomed)
            shutil.rmtree(doomed)


def sweep(run_folder: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    for pattern in (".step-*", "step-*/.*"):
        for left in run_folder.glob(pattern):
            remove(left)


def clear(run_folder: Path) -> None:
    """Remove the run that a folder holds: step folders, whole or half-written, and the journal."""
    sweep(run_folder)
    for step in steps(run_folder):
        shutil.rmtree(step)
    (run_folder / JOURNAL).unlink(missing_ok=True)


def set_broken_aside(run_folder: Path, whole: Path) -> None:
    """Rename the step folders after ``whole`` to ``broken-...``: their steps will be made and saved again."""
    for step in steps(run_folder):
        if (step_number(step) or 0) > (step_number(whole) or 0):
            broken = run_folder / f"broken-{step.name}"
            remove(broken)
            os.rename(step, broken)


def read_run(step: Path) -> Run:
    """The run of a step folder. Raises ``Refusal`` naming what is wrong with ``run.json``."""
    return Run.from_json(_text(step / RUN), where=str(step / RUN))


def last_described(run_folder: Path) -> Path | None:
    """The newest step folder whose ``run.json`` and ``state.json`` are whole, the only files read; None: none is."""
    return next((step for step in reversed(steps(run_folder)) if fault(step, {RUN}) is None), None)


def last_run(run_folder: Path) -> Run | None:
    """The run of ``last_described``; None where there is none."""
    step = last_described(run_folder)
    return None if step is None else read_run(step)


def read_state(step: Path) -> State:
    """Where a step folder's run stands."""
    try:
        data = json.loads(_text(step / STATE))
    except (ValueError, RecursionError) as error:
        raise Refusal(step / STATE, unreadable(error), "JSON") from None
    if not isinstance(data, dict):
        raise Refusal(step / STATE, kind_of(data), "a JSON object")
    fields = {name: value for name, value in data.items() if name not in ("files", "checksum")}
    return typed(State, fields, str(step / STATE))


def origin(step: Path) -> dict[str, Any]:
    """What results say of the checkpoint that they were measured at: ``run``, ``step``, ``pretraining_seconds`` and
    ``recipe``."""
    return {
        "run": folder_of(step).resolve().name,
        "step": step_number(step),
        "pretraining_seconds": read_state(step).seconds,
        "recipe": read_run(step).recipe,
    }


def identity(step: Path) -> str:
    """What tells a checkpoint's model from others, whatever its folder is called: 16 hex digits of SHA-256 of the
    checksums of its files but the optimizer's."""
    files = json.loads(_text(step / STATE))["files"]
    return json_checksum({name: digest for name, digest in files.items() if name != OPTIMIZER})[:16]


def read_pretrainer(step: Path) -> Pretrainer:
    """Encoder, decoder and head in fp32, in evaluation mode. Raises ``Refusal`` listing keys that do not match."""
    import torch

    from latemask.model.pretrainer import Pretrainer

    run = read_run(step)
    with torch.device("meta"):  # no weights are drawn that are read in the next lines
        model = Pretrainer(run)
    tensors = {f"encoder.{name}": tensor for name, tensor in _tensors(step / ENCODER).items()}
    load_strictly(model, tensors | _tensors(step / REST), step)
    return model.eval()


def read_encoder(step: Path) -> Encoder:
    """The encoder alone in fp32, in evaluation mode. Raises ``Refusal`` listing keys that do not match."""
    import torch

    from latemask.model.encoder import Encoder

    shape = read_run(step).shape
    with torch.device("meta"):
        encoder = Encoder(shape)
    load_strictly(encoder, _tensors(step / ENCODER), step / ENCODER)
    return encoder.eval()


def read_optimizer(step: Path) -> dict[str, Tensor]:
    return _tensors(step / OPTIMIZER)


def load_strictly(module: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """``load_state_dict`` in which every missing, unexpected or misshapen key, and every one whose numbers are of
    another kind (whole ones for floating-point ones, say), is a ``Refusal`` that lists it.

    Parameters of ``module`` that are on the device meta become copies of ``tensors``.
    """
    own = module.state_dict()
    odd = [f"missing {name}" for name in own.keys() - tensors.keys()]
    odd += [f"unexpected {name}" for name in tensors.keys() - own.keys()]
    odd += [f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
            for name in own.keys() & tensors.keys() if tensors[name].shape != own[name].shape]  # fmt: skip
    odd += [f"{name} of {tensors[name].dtype}" for name in own.keys() & tensors.keys()
            if tensors[name].is_floating_point() != own[name].is_floating_point()]  # fmt: skip
    if odd:
        more = f" and {len(odd) - 6} more" if len(odd) > 6 else ""
        raise Refusal(where, ", ".join(sorted(odd)[:6]) + more, "the tensors of its run.json")
    if is_empty := any(tensor.is_meta for tensor in own.values()):
        tensors = {name: tensor.to(own[name].dtype, copy=True) for name, tensor in tensors.items()}
    module.load_state_dict(tensors, assign=is_empty)


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    plain = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    prefix = "encoder."
    encoder = {name.removeprefix(prefix): tensor for name, tensor in plain.items() if name.startswith(prefix)}
    return encoder, {name: tensor for name, tensor in plain.items() if not name.startswith(prefix)}


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise Refusal(path, "no such file", "a checkpoint's tensors") from None
    except (SafetensorError, OSError) as error:
        raise Refusal(path, f"a broken file ({error})", "a safetensors file") from None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise Refusal(path, "no such file", "a step folder") from None
    except (UnicodeDecodeError, OSError) as error:
        raise Refusal(path, unreadable(error), "JSON") from None
