"""Run folders as a report finds them: journals, studies, fine-tunings and evaluations in JSON, with made-up numbers in
the form that the commands write."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from zlib import crc32

from latemask.config import replace
from latemask.downstream.settings import Settings
from latemask.downstream.tasks import GLUE, SQUAD
from latemask.recipes import recipe


def write_journal(
    folder: Path, name: str = "mlm_tiny", rate: float = 0.15, fields: dict[str, Any] | None = None, **training: Any
) -> Path:
    """A run of 30 steps with two validations, the second at 5.25. As with real runs, no two have all numbers alike: the
    last digits of one come from its folder's name."""
    changes = (fields or {}) | {f"training.{key}": value for key, value in training.items()}
    run = json.loads(replace(recipe(name), changes).to_json())
    train = {"kind": "train", "loss": 4.0, "learning_rate": 1e-3, "gradient_norm": _its_own(folder),
             "flops_per_second": 1e9, "memory_bytes": 1}  # fmt: skip
    lines = [
        {"kind": "start", "step": 0, "run": run, "card": "cpu", "world": 1, "plain_flops_per_token": 6e6,
         "flops_per_token": 5e6, "encoder_parameters": 1_500_000, "parameters": 1_600_000},
        {"kind": "validation", "step": 0, "loss": 8.3, "by_source": {}, "rate": rate, "rows": 8},
        {**train, "step": 10, "tokens": 1000, "seconds": 1.0, "tokens_per_second": 900.0, "mfu": None},
        {**train, "step": 20, "tokens": 2000, "seconds": 2.0, "tokens_per_second": 1100.0, "mfu": 0.25},
        {**train, "step": 30, "tokens": 3000, "seconds": 3.0, "tokens_per_second": 1000.0, "mfu": 0.35},
        {"kind": "skip", "step": 25, "batch": 24, "rows": [1], "skips_in_a_row": 1},
        {"kind": "validation", "step": 30, "loss": 5.25, "by_source": {"law": 5.0, "prose": 5.5}, "rate": rate},
        {"kind": "end", "step": 30, "reason": "steps", "seconds": 3.0},
    ]  # fmt: skip
    return write_lines(folder, lines)


def _its_own(folder: Path) -> float:
    return 1 + crc32(str(folder).encode()) / 2**40


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_curve(
    folder: Path, name: str, floor: float, seconds: float, fields: dict[str, Any] | None = None, steps: int = 1000
) -> Path:
    """A run whose loss falls from 10 to about ``floor``, in ``seconds`` in all."""
    write_journal(folder, name, fields=fields)
    start = json.loads((folder / "journal.jsonl").read_text().splitlines()[0])
    lines: list[dict[str, Any]] = [start]
    for step in range(0, steps + 1, steps // 20):
        loss, done = floor + (10 - floor) * math.exp(-4 * step / steps), seconds * step / steps
        if step:
            lines.append({"kind": "train", "step": step, "tokens": step * 32 * 128, "seconds": done, "loss": loss,
                          "tokens_per_second": 4000.0, "mfu": 0.4, "gradient_norm": _its_own(folder)})  # fmt: skip
        lines.append({"kind": "validation", "step": step, "loss": loss - 0.1, "rate": 0.15, "seconds": done,
                      "by_source": {"books": loss, "news": loss - 0.2}})  # fmt: skip
    return write_lines(folder, [*lines, {"kind": "end", "step": steps, "reason": "steps", "seconds": seconds}])


def point(
    task: str, score: float, seed: int = 0, *, run: str = "x", step: int | None = 1000, subset: bool = False,
    degenerate: bool = False, fingerprint: str = "data", **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """What ``latemask finetune`` writes of a point; ``score`` of 1 (SQuAD: of 100)."""
    known = SQUAD if task == "squad2" else GLUE[task]
    splits = ("dev",) if task == "squad2" else known.dev_splits
    scores = {split: dict.fromkeys(known.metrics, score + 0.001 * number) for number, split in enumerate(splits)}
    if task == "squad2":
        scores["dev"]["exact"] = score - 3
    majority = {split: dict.fromkeys(values, 0.5) for split, values in scores.items()}
    model = {"folder": f"runs/{run}/step-{step or 0:07d}", "weights": f"{run}-{step}", "tokenizer": "t"}
    if step is not None:
        model |= {"run": run, "step": step, "pretraining_seconds": step / 10, "recipe": "mlm_tiny"}  # type: ignore[dict-item]
    return {
        "format": 1, "kind": "finetune", "task": task, "title": known.title, "metric": known.metrics[0],
        "score": score, "scores": scores, "majority": majority, "degenerate": degenerate, "degenerate_because": [],
        "subset": {"train": "10 of 1,000"} if subset else {}, "model": model, "seed": seed,
        "data": {"dev": {"fingerprint": fingerprint}}, "settings": Settings(seed=seed, **settings).to_dict(),
        "train_seconds": 2.0, "versions": {}, "card": "cpu",
    }  # fmt: skip


def study(model: str, *, width: int = 128, depth: int = 4, sees_masks: bool = True, top: int = 90) -> dict[str, Any]:
    """What ``latemask rank`` writes."""

    def one(layer: int, share: float) -> dict[str, Any]:
        rank = round(top * share * (0.4 + 0.6 * layer / depth))
        return {"rank": rank, "centred": rank + 2, "vectors": 50_000, "few_vectors": False}

    layers = [{"layer": layer, "clean_input": one(layer, 1.0),
               "masked_input": one(layer, 0.9) if sees_masks else None,
               "masked_input_real": one(layer, 0.8) if sees_masks else None,
               "masks": one(layer, 0.3) if sees_masks else None} for layer in range(depth + 1)]  # fmt: skip
    return {"kind": "rank", "tau": 0.9, "model": model, "recipe": "mlm_tiny", "data": "data/en", "rate": 0.15,
            "specials": "left out", "sees_masks": sees_masks, "width": width, "depth": depth,
            "layers": layers}  # fmt: skip


def theory(model: str, depth: int = 4) -> dict[str, Any]:
    """What ``latemask theory`` writes."""
    residual = {"norm": 10.0, "share": 0.8}
    layers = [{"layer": layer, "residual_masked_input": residual, "residual_clean_input": residual, "real_rank": 60,
               "masks_outside": 0.05 + 0.05 * layer, "masks_spread_outside": 0.5, "real_outside": 0.1, "sweep": [],
               "few_vectors": False} for layer in range(depth + 1)]  # fmt: skip
    row = {"residual": 1.0, "one": 0.1, "infinity_printed": 7.5, "infinity_corrected": 0.02, "cubic": 0.01}
    bounds = {"scaled": [row, {**row, "residual": 1e3, "infinity_printed": 700.0}], "inside": [row], "outside": [row]}
    return {**study(model), "kind": "theory", "layers": layers, "bounds": bounds}


def pairs(run: str, score: float, step: int = 1000, whole_words: bool = False) -> dict[str, Any]:
    """What ``latemask evaluate --suite blimp`` writes."""
    part = {"accuracy": score, "pairs": 500, "ties": 1}
    model = {"folder": f"runs/{run}", "run": run, "step": step, "pretraining_seconds": step / 10, "recipe": "mlm_tiny"}
    return {"format": 1, "kind": "evaluation", "suite": "blimp", "model": model, "score": score, **part,
            "fields": {"syntax": part, "semantics": {**part, "accuracy": score - 0.05}}, "paradigms": {},
            "refused_rows": {}, "options": {"whole_words": whole_words}, "card": "cpu", "versions": {}}  # fmt: skip


def masked_loss(run: str, loss: float, rate: float = 0.15, text: str = "0af1") -> dict[str, Any]:
    """What ``latemask evaluate --suite masked-loss`` writes."""
    return {**pairs(run, loss), "suite": "masked-loss", "loss": loss, "loss_per_character": loss / 4, "by_source": {},
            "masked_tokens": 9000, "rows": 100, "row_tokens": 128, "rate": rate, "tokenizer": "abc",
            "fingerprint": text}  # fmt: skip


def similarity(run: str) -> dict[str, Any]:
    """What ``latemask evaluate --suite similarity`` writes."""
    return {**pairs(run, 0.6), "suite": "similarity", "scores": {"dev": {"spearman": 0.6, "pearson": 0.58}},
            "options": {"data": "glue/STS-B"}}  # fmt: skip


def finetuned(run: str, score: float, is_constant: bool = False) -> dict[str, Any]:
    """What ``latemask evaluate --suite finetuned`` writes of MNLI."""
    model = {"folder": f"runs/{run}/downstream/mnli-e3-lr2e-05-b32-w0.06-s0-abc.model"}
    scores = {split: {"accuracy": score + 0.001 * number} for number, split in enumerate(GLUE["mnli"].dev_splits)}
    return {**pairs(run, score), "suite": "finetuned", "model": model, "task": "mnli", "scores": scores,
            "is_constant": is_constant, "options": {"data": "glue/MNLI"}, "subset": {}, "data": {}}  # fmt: skip


def put(folder: Path, *results: dict[str, Any]) -> Path:
    """Write results where the commands do: studies beside the journal, everything else in ``downstream``."""
    for number, result in enumerate(results):
        is_study = result["kind"] in ("rank", "theory")
        place = folder if is_study else folder / "downstream"
        place.mkdir(parents=True, exist_ok=True)
        name = result["kind"] if is_study and not (place / f"{result['kind']}.json").exists() else (
            f"{result['kind']}-{len(list(place.iterdir()))}-{number}")  # fmt: skip
        (place / f"{name}.json").write_text(json.dumps(result))
    return folder


def everything(runs: Path) -> list[Path]:
    """Two runs with all that a report can show, and another model's results."""
    folders = []
    for name, system, floor, gain in (("mlm", "mlm_base", 2.3, 0.0), ("mae", "mae_lm_base", 2.1, 0.02)):
        folder = write_curve(runs / name, system, floor, 3600 if name == "mlm" else 4200)
        points = [point(task, 0.7 + 0.02 * number + gain + 0.004 * seed, seed, run=name, learning_rate=rate,
                        subset=task in ("qnli", "qqp", "mnli"), degenerate=task == "cola" and seed == 0)
                  for number, task in enumerate(GLUE) for seed in range(3) for rate in (2e-5, 5e-5)]  # fmt: skip
        points += [point("squad2", 70.0 + 100 * gain, run=name)]
        for step in (250, 500) if name == "mae" else ():
            points += [point("rte", 0.6 + step / 10_000, run=name, step=step)]
        tuned = study(f"runs/{name}/downstream/mnli-e3-lr2e-05-b32-w0.06-s0-abc.model", width=768, depth=12, top=180)
        put(folder, study(f"runs/{name}", sees_masks=name == "mlm", width=768, depth=12, top=460), tuned, *points,
            pairs(name, 0.7 + gain), masked_loss(name, floor), similarity(name))  # fmt: skip
        folders.append(folder)
    put(folders[0], theory("runs/mlm", 12))
    other = [{**point("rte", 0.66, seed), "model": {"folder": "roberta-base", "weights": "r", "tokenizer": "t"}}
             for seed in range(2)]  # fmt: skip
    folders.append(put(runs / "roberta-base", *other))
    return folders
