"""A stranger's first contact with an export: a process that knows transformers alone loads it and says what it got.

Run as `python fresh.py FOLDER` by `latemask.hf.verification`, which puts a question into FOLDER and reads the answer
there. In float64, so that what differs is the model and not the arithmetic.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer


def answer(folder: Path) -> None:
    """Read `question.json` and `rows.safetensors`; write `answer.json` and `answer.safetensors`."""
    question = json.loads((folder / "question.json").read_text())
    source, trust = question["export"], question["trusts_code"]
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    auto = AutoModelForMaskedLM if question["fills_masks"] else AutoModel
    model, report = auto.from_pretrained(source, output_loading_info=True, trust_remote_code=trust)
    model = model.double().eval()

    def outputs(ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Hidden states of real tokens [K, D], or logits at masks [K, T]."""
        with torch.inference_mode():
            if question["fills_masks"]:
                return model(input_ids=ids, attention_mask=real).logits[ids == question["mask"]]
            return model(input_ids=ids, attention_mask=real).last_hidden_state[real.bool()]

    together = tokenizer(question["texts"], padding=True, truncation=True, return_tensors="pt")
    alone = [tokenizer(text, truncation=True, return_tensors="pt") for text in [*question["texts"], question["long"]]]
    tensors = {
        "texts": outputs(together["input_ids"], together["attention_mask"]),
        "alone": torch.cat([outputs(one["input_ids"], one["attention_mask"]) for one in alone]),
    }
    rows = load_file(folder / "rows.safetensors")
    for side in ("full", "right", "left"):
        tensors[side] = outputs(rows[f"{side}.ids"], rows[f"{side}.real"].long())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "answer.safetensors")
    answers = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "mismatched": sorted(map(str, report["mismatched_keys"])),
        "errors": sorted(map(str, report.get("error_msgs") or [])),
        "model_class": type(model).__name__,
        "tokenizer_class": type(tokenizer).__name__,
        "longest": tokenizer.model_max_length,
        "literals": tokenizer(question["literals"])["input_ids"],
        "together": together["input_ids"].tolist(),
        "alone": [one["input_ids"][0].tolist() for one in alone],
        "transformers": transformers.__version__,
    }
    (folder / "answer.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
