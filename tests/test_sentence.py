"""An exported encoder is a folder of sentence-transformers: loaded without a warning, the vectors of ``encode``."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest
import torch

import latemask
from latemask.hf.exporting import export
from latemask.hf.loading import load_encoder, load_tokenizer_of
from latemask.hf.vectors import framed
from samples import small
from trained import byte_level, verified_here, write_run

TEXTS = ["the cat and the dog saw the bird", "Paris is the capital of France. " * 20, "", "  spaces \n around  ",
         "naïve café – 東京", "<mask> in </s> a text"]  # fmt: skip
SYSTEMS = {
    "RobertaModel": {"positions": "absolute"},
    "MPNetModel": {"positions": "absolute+relative"},
    "RoFormerModel": {"positions": "rotary"},
    "LatemaskModel": {"positions": "rotary", "norm": "pre"},
}


@pytest.fixture(scope="module", params=SYSTEMS)
def folder(request, tmp_path_factory) -> Path:
    """A run and its export, of each class that an export may have."""
    folder = tmp_path_factory.mktemp(request.param)
    write_run(folder / "run", small("mae_lm", **SYSTEMS[request.param]), byte_level())
    with verified_here():
        assert export(folder / "run", folder / "out").model_class == request.param
    return folder


def test_sentence_transformers_gives_the_vectors_of_encode_and_warns_of_nothing(folder, caplog):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    has_code = (folder / "out" / "modeling_latemask.py").is_file()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        model = library.SentenceTransformer(str(folder / "out"), device="cpu", trust_remote_code=has_code)
        vectors = model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    assert not [
        record for record in caplog.records if record.name.startswith(("sentence_transformers", "transformers"))
    ]
    assert model.max_seq_length == 36
    torch.testing.assert_close(vectors, latemask.encode(TEXTS, folder / "run"), rtol=0, atol=1e-5)


def test_the_files_say_mean_over_all_tokens_of_the_whole_row(folder):
    """What their format means, done by hand: the library need not be there."""
    modules = json.loads((folder / "out" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling"]
    assert [module["path"] for module in modules] == ["", "1_Pooling"]
    pooling = json.loads((folder / "out" / "1_Pooling" / "config.json").read_text())
    assert [name for name, on in pooling.items() if on is True] == ["pooling_mode_mean_tokens"]
    settings = json.loads((folder / "out" / "sentence_bert_config.json").read_text())
    encoder, tokenizer = load_encoder(folder / "out"), load_tokenizer_of(folder / "out")
    assert pooling["word_embedding_dimension"] == encoder.shape.width
    for text, vector in zip(TEXTS, latemask.encode(TEXTS, folder / "run"), strict=True):
        row = framed(tokenizer.encode_batch([text])[0].tolist(), tokenizer.specials, settings["max_seq_length"])
        with torch.no_grad():
            mean = encoder(torch.tensor([row]))[0].mean(0)
        torch.testing.assert_close(mean, vector, rtol=0, atol=1e-5)


def test_an_export_that_fills_masks_is_not_offered_for_sentences(tmp_path):
    write_run(tmp_path / "run", small("mae_lm"), byte_level())
    with verified_here():
        export(tmp_path / "run", tmp_path / "out", kind="masked-lm")
    assert not (tmp_path / "out" / "modules.json").exists()


def test_texts_that_do_not_fit_are_counted_in_one_warning(tmp_path, capsys):
    step = write_run(tmp_path, small("mae_lm"), byte_level())
    latemask.encode(["a" * 34, "b"], step)  # 36 with the special tokens
    assert capsys.readouterr().err == ""
    latemask.encode(["a" * 34, "c" * 35, "d" * 99], step)
    assert capsys.readouterr().err == "warning: 2 of 3 texts are longer than 36 tokens and were cut\n"
