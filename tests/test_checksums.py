"""No file of an export or a fine-tuned model is used that has changed since it was written."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latemask import load_encoder
from latemask.downstream.finetune import Model
from latemask.downstream.heads import FineTuned
from latemask.downstream.saving import load_finetuned, save_finetuned
from latemask.errors import Refusal
from latemask.hf.checksums import SUMS
from samples import small
from test_fuzz import an_export
from test_loading import Asked
from trained import byte_level, write_run


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    an_export(folder)
    return folder / "hf"


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetuned")
    write_run(folder / "run", small("mlm", positions="absolute"), byte_level())
    model = Model.load(folder / "run")
    net = FineTuned(model.encoder, "classification", 2, 0.0)
    save_finetuned(net, model, Asked("classification"), {}, folder / "saved")  # type: ignore[arg-type]
    return folder / "saved"


KINDS: dict[str, Callable[[Path], Any]] = {"exported": load_encoder, "finetuned": load_finetuned}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path], Any]]:
    """A copy of a folder, and what loads it."""
    shutil.copytree(request.getfixturevalue(request.param), tmp_path / "copy")
    return tmp_path / "copy", KINDS[request.param]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")


def test_no_flipped_bit_is_used(kind: tuple[Path, Callable[[Path], Any]]) -> None:
    """In any file, that of the checksums among them; the card alone may be edited."""
    folder, load = kind
    assert len(files(folder)) > 4
    load(folder)
    chance = random.Random(0)
    for path in files(folder):
        whole = path.read_bytes()
        for _ in range(20):
            place = chance.randrange(len(whole))
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
            with pytest.raises(Refusal):
                load(folder)
        path.write_bytes(whole)
    load(folder)


def test_what_changed_is_named_and_may_be_meant(kind: tuple[Path, Callable[[Path], Any]]) -> None:
    folder, load = kind
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 64]))
    with pytest.raises(Refusal, match=r"model\.safetensors: found a file that differs .* delete .*SHA256SUMS"):
        load(folder)
    weights.unlink()
    with pytest.raises(Refusal, match=r"model\.safetensors: found no such file"):
        load(folder)
    weights.write_bytes(whole)
    with (folder / "README.md").open("a") as card:
        card.write("\nMine.\n")
    load(folder)
    (folder / SUMS).unlink()
    load(folder)


@pytest.mark.parametrize("line", [b"x", b"\xff", b"", b"0" * 64 + b"  /dev/zero", b"0" * 64 + b"  ../../run.json",
                                  b"0" * 64 + b"  1_Pooling", b"0" * 64 + b"  \0",
                                  b"0" * 64 + b"  " + b"a" * 5000])  # fmt: skip
def test_other_lines_are_refused_by_number_and_no_other_file_is_read(line: bytes, exported: Path, tmp_path: Path):
    shutil.copytree(exported, tmp_path / "copy")
    with (tmp_path / "copy" / SUMS).open("ab") as sums:
        sums.write(line + b"\n")
    with pytest.raises(Refusal, match=r"SHA256SUMS|no such file"):
        load_encoder(tmp_path / "copy")


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_sha256sum_checks_them_too(exported: Path) -> None:
    subprocess.run(["sha256sum", "--strict", "-c", SUMS], cwd=exported, check=True, capture_output=True)


def test_transformers_and_sentence_transformers_do_not_look_at_them(exported: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    model, report = AutoModel.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())
    ids = torch.tensor([[0, 50, 2]])
    assert torch.allclose(model(ids).last_hidden_state, load_encoder(exported)(ids), atol=1e-5)
    assert SentenceTransformer(str(exported), device="cpu").encode("the cat").shape == (32,)
