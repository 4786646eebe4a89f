"""The stock model that we are compared with: what is written of it is what it is, and any command takes it as a run."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmark_files import load
from latemask.config import replace
from latemask.text.store import open_store
from latemask.training import checkpoint, journal, loop
from latemask.training.plateau import is_no_better
from training_support import tiny_run, write_store

roberta = load("roberta")


def test_roberta_learns_and_its_checkpoint_is_a_run_of_ours(tmp_path):
    store = open_store(write_store(tmp_path / "data"))
    changes = {"shape.positions": "absolute", "shape.dropout": 0.0, "training.steps": 12, "training.validate_every": 6}
    run = store.fitted(replace(tiny_run("mlm"), changes))
    (tmp_path / "out").mkdir()
    trainer = roberta.Trainer(run, roberta.Options(store.folder, tmp_path / "out"), store)
    trainer.train()

    lines = journal.read(tmp_path / "out" / "journal.jsonl")
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert [line["step"] for line in lines if line["kind"] == "save"] == [0, 3, 6, 9, 12]
    ours_too = loop.pretrain(run, store.folder, tmp_path / "ours").step.parent
    own = journal.read(ours_too / "journal.jsonl")
    for name in ("rows", "refused_rows", "dropped_tokens", "unigram_loss", "validation_text"):
        assert lines[0][name] == own[0][name]
    [reached] = [line["loss"] for line in lines if line["kind"] == "validation" and line["step"] == 12][-1:]
    assert lines[-1]["word_frequencies_only"] == is_no_better(reached, own[0]["unigram_loss"])

    ours = checkpoint.read_pretrainer(checkpoint.newest(tmp_path / "out"))
    theirs = trainer.model.eval()
    batch = trainer.batches.batch_at(20)
    ids = torch.empty_like(batch.ids).scatter(1, batch.positions, batch.ids)
    masked = batch.positions[:, batch.n_visible :]
    with torch.no_grad():
        found = ours(batch)
        logits = theirs(input_ids=ids.scatter(1, masked, run.shape.specials.mask)).logits[..., : store.vocabulary]
        picked = logits.gather(1, masked[..., None].expand(-1, -1, store.vocabulary))
        wanted = F.cross_entropy(picked.flatten(0, 1), batch.targets.flatten(), reduction="none")
    torch.testing.assert_close(found.flatten(), wanted, rtol=0, atol=2e-5)


def test_roberta_stops_on_the_plateau_where_it_is_to(tmp_path):
    """As a run of ours does: told at the second validation after the warm-up, saved, and known by its exit status."""
    store = open_store(write_store(tmp_path / "data", draw=lambda numbers, count: 9 + numbers.geometric(0.9, count)))
    changes = {"shape.positions": "absolute", "training.steps": 8, "training.validate_every": 2,
               "training.learning_rate": 1e-9}  # fmt: skip
    run = store.fitted(replace(tiny_run("mlm"), changes))
    for stops, reason, step in ((False, "steps", 8), (True, "plateau", 4)):
        out = tmp_path / reason
        out.mkdir()
        settings = replace(run, {"training.stops_on_plateau": stops})
        assert roberta.Trainer(settings, roberta.Options(store.folder, out), store).train() == reason
        lines = journal.read(out / "journal.jsonl")
        assert [line["step"] for line in lines if line["kind"] == "plateau"] == [4]
        assert (lines[-1]["kind"], lines[-1]["reason"], lines[-1]["step"]) == ("end", reason, step)
        assert checkpoint.newest(out).name == checkpoint.step_name(step)
