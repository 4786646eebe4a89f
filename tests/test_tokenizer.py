"""Training, other people's tokenizers, and text that looks like a special token."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from latemask.cli.options import parse
from latemask.errors import Refusal
from latemask.text import words
from latemask.text.blocks import Reading
from latemask.text.corpus import Counts
from latemask.text.prepare import PrepareOptions, run_prepare
from latemask.text.tokenizer import (
    ROLES,
    SPECIAL_TOKENS,
    Tokenizer,
    TokenizerOptions,
    fingerprint,
    load_tokenizer,
    run_tokenizer,
    train_tokenizer,
)
from latemask.text.words import pieces, word_pattern
from trained import byte_level

BERT = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
LITERALS = ["<mask>", "</s>", "<pad>", "<s>", "<unk>", "[MASK]", "[SEP]", "[PAD]", "[CLS]", "[UNK]"]


def prose() -> str:
    """The documentation that every Python carries."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


@pytest.fixture(scope="module")
def prose_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prose") / "prose.txt"
    path.write_text(prose(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(prose_file) -> Tokenizer:
    return train_tokenizer([prose_file], 2000)


def library(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of each kind of model, trained on the prose, the literals among its words."""
    specials = BERT if kind in ("wordpiece", "wordlevel split at spaces") else list(SPECIAL_TOKENS)
    text = [*prose().splitlines()[:4000], *(f"{literal} {literal}" for literal in LITERALS for _ in range(50))]
    if kind == "gpt2":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=1000, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    elif kind == "bpe without pre-tokens":
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=specials)
    elif kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=1000, special_tokens=specials)
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=1000, special_tokens=specials, unk_token="<unk>")
    elif kind == "wordlevel split at spaces":
        made = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(vocab_size=1000, special_tokens=specials)
    else:
        assert kind == "characters"
        made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
        made.decoder = decoders.Fuse()
        trainer = trainers.WordLevelTrainer(special_tokens=specials)
    made.train_from_iterator(text, trainer)
    for _ in range(3 * (kind == "unigram")):  # a score may lose its last bit on the way through JSON, and ties with it
        made = tokenizers.Tokenizer.from_str(made.to_str())
    return made


KINDS = ["gpt2", "bpe without pre-tokens", "wordpiece", "unigram", "wordlevel split at spaces", "characters"]


@pytest.fixture(scope="module", params=KINDS)
def users(request) -> Tokenizer:
    return Tokenizer(library(request.param))


# Training ----------------------------------------------------------------------------------------------------------


def test_special_ids_and_size(trained):
    assert [trained.library.id_to_token(number) for number in range(5)] == list(SPECIAL_TOKENS)
    assert trained.specials.ids == (0, 1, 2, 3, 4)
    assert trained.vocabulary == 2000
    assert trained.encode_batch(["x"])[0].dtype == np.uint16


@pytest.mark.parametrize("cased", [True, False])
@given(text=st.text())
def test_every_text_survives_the_round_trip(cased, text):
    tokenizer = round_trip(cased)
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == tokenizer.library.normalizer.normalize_str(text)
    assert not np.isin(ids, tokenizer.specials.ids).any()


def round_trip(cased: bool, made: dict[bool, Tokenizer] = {}) -> Tokenizer:  # noqa: B006
    """Trained once for each case."""
    if cased not in made:
        file = io.BytesIO(prose().encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(file)))
            made[cased] = train_tokenizer(["-"], 1000, cased=cased, reading=Reading(format="text"))
    return made[cased]


def test_case(prose_file):
    uncased, cased = round_trip(False), round_trip(True)
    assert uncased.decode(uncased.encode_batch(["ÀB E\u0301"])[0]) == "àb é"
    assert cased.decode(cased.encode_batch(["ÀB E\u0301"])[0]) == "ÀB É"


def test_the_readme_names_every_special_token_that_an_own_tokenizer_may_have():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert [name for names in ROLES.values() for name in names if f"`{name}`" not in readme] == []


def test_common_words_are_short_and_otherwise_warned_of(tmp_path, capsys):
    text = "\n\n".join(f"remarkable{i} considerable{i} {i}" for i in range(300))
    (tmp_path / "a.txt").write_text(text)
    train_tokenizer([tmp_path / "a.txt"], 270)
    warned = capsys.readouterr().err
    assert "commonest words take more than two tokens: " in warned
    assert "without spaces" not in warned
    (tmp_path / "proteins.txt").write_text("\n".join("".join(random.Random(i).choices("ACDEFGHIKLMNPQRSTVWY", k=60))
                                                    for i in range(300)))  # fmt: skip
    train_tokenizer([tmp_path / "proteins.txt"], 270)
    assert "For text without spaces, of which each character is to be a token, bring" in capsys.readouterr().err
    (tmp_path / "b.txt").write_text("some plain words and no more\n\n" * 50)
    train_tokenizer([tmp_path / "b.txt"], 300)
    assert "commonest" not in capsys.readouterr().err
    train_tokenizer([tmp_path / "b.txt"], 3000)
    warned = capsys.readouterr().err
    assert re.search(r"3,000 ids were asked for, the text gave \d+: no other pair .* a smaller --vocab-size", warned)


def test_a_long_line_without_spaces_ends_in_bounded_time(tmp_path):
    generator = random.Random(0)
    (tmp_path / "dna.txt").write_text("".join(generator.choices("ACGT", k=1_000_000)) + "\n\nsome words " * 20)
    begun = time.monotonic()
    tokenizer = train_tokenizer([tmp_path / "dna.txt"], 300)
    (ids,) = tokenizer.encode_batch([(tmp_path / "dna.txt").read_text()])
    assert time.monotonic() - begun < 60
    assert len(ids) > 100_000
    assert max(len(token) for token in tokenizer.library.get_vocab()) <= 64


def test_large_text_is_read_evenly(tmp_path, capsys):
    for name, word in (("a.txt", "alpha"), ("b.txt", "beta"), ("c.txt", "gamma")):
        (tmp_path / name).write_text(f"{word} {word[::-1]} one two three four five\n\n" * 60_000)
    counts: dict[str, Counts] = {}
    train_tokenizer([tmp_path], 300, sample_mb=3, counts=counts)
    read = [met.text_bytes / 1e6 for met in counts.values()]
    assert sum(read) == pytest.approx(3, rel=0.35)
    assert max(read) < 1.6 * min(read)


def test_bad_training_input(tmp_path, prose_file, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n \n")
    with pytest.raises(Refusal, match=r"empty.txt: found no text"):
        train_tokenizer([tmp_path / "empty.txt"], 300)
    with pytest.raises(Refusal, match=r"blank.txt"):
        train_tokenizer([tmp_path / "blank.txt"], 300)
    with pytest.raises(Refusal, match=r"--vocab-size: found 260; wanted at least 261.*prepare --tokenizer FILE"):
        train_tokenizer([prose_file], 260)
    (tmp_path / "bad.txt").write_bytes(b"good words\nmore\nbad \xff byte\n")
    with pytest.raises(Refusal, match=r"bad.txt:3: found byte 0xff at byte 20"):
        train_tokenizer([tmp_path / "bad.txt"], 300)
    train_tokenizer([tmp_path], 300, reading=Reading(invalid="replace"))
    assert "empty.txt: no text" in capsys.readouterr().err


def test_command(tmp_path, capsys, prose_file):
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "a file.txt").write_text(prose()[:200_000])
    options = TokenizerOptions(files=(f"{folder}/a*.txt",), out=str(tmp_path / "tok"), vocab_size=500)
    run_tokenizer(options)
    printed = capsys.readouterr().out
    assert "500 ids, uncased" in printed
    assert f"Next: latemask prepare '{folder}/a*.txt' --tokenizer {tmp_path}/tok --out data/en" in printed
    assert load_tokenizer(tmp_path / "tok").vocabulary == 500
    assert [path.name for path in (tmp_path / "tok").iterdir()] == ["tokenizer.json"]
    with pytest.raises(Refusal, match=r"something already there.*--overwrite"):
        run_tokenizer(options)
    run_tokenizer(TokenizerOptions(**{**options.__dict__, "vocab_size": 400, "overwrite": True}))
    assert load_tokenizer(tmp_path / "tok").vocabulary == 400
    with pytest.raises(Refusal, match="may be overwritten"):
        run_tokenizer(TokenizerOptions(**{**options.__dict__, "out": str(folder), "overwrite": True}))


def test_the_next_command_reads_as_this_one_did(tmp_path, capsys):
    (tmp_path / "notes.jsonl").write_text('{"the body": "one two"}\n{"the body": null}\n' * 20)
    how = {"text_field": "the body", "invalid": "skip", "documents": "line", "longest_document_mb": 2}
    run_tokenizer(TokenizerOptions(files=(f"{tmp_path}/notes.jsonl",), out=f"{tmp_path}/tok", vocab_size=270, **how))
    printed = capsys.readouterr().out.splitlines()
    (row,) = (line.split()[1:] for line in printed if line.strip().startswith(f"{tmp_path}/notes.jsonl "))
    assert row[:3] == ["20", "0", "20"], "documents, and beside them the empty ones and those left out"
    (command,) = (line for line in printed if line.startswith("Next: "))
    assert "--source-field" not in command, "as it is by default"
    program, name, *arguments = shlex.split(command.removeprefix("Next: "))
    assert (program, name) == ("latemask", "prepare")
    options = parse(PrepareOptions, arguments, prog="latemask prepare")
    assert {name: getattr(options, name) for name in how} == how
    run_prepare(dataclasses.replace(options, out=f"{tmp_path}/data"))


# Other people's tokenizers -----------------------------------------------------------------------------------------


def test_literals_of_special_tokens_are_text(users):
    for text in [*LITERALS, " ".join(LITERALS), "".join(LITERALS), "a<mask>b [MASK]c </s>"]:
        (ids,) = users.encode_batch([text])
        assert len(ids)
        assert not np.isin(ids, [number for number in users.specials.ids if number != users.specials.unk]).any()
    (ids,) = users.encode_batch(["a [MASK] </s> <pad>"])
    assert len(ids) == len(users.encode_batch(["a"])[0]) + sum(
        len(users.encode_batch([f" {word}"])[0]) for word in ("[MASK]", "</s>", "<pad>")
    )


def test_the_library_itself_would_take_literals_for_special_tokens():
    made = library("gpt2")
    assert made.encode("a <mask>").ids[-1] == made.token_to_id("<mask>")


@pytest.mark.parametrize("kind", ["gpt2", "bpe without pre-tokens", "unigram", "characters"])
def test_literals_survive_the_round_trip(kind):
    tokenizer = Tokenizer(library(kind))
    text = "before <mask> and [MASK], </s> <pad> after"
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


def test_other_text_is_encoded_as_the_library_does(users):
    texts = prose().split("\n\n")[::7]
    texts = [text for text in texts if not any(literal in text for literal in LITERALS)]
    for text, ids in zip(texts, users.encode_batch(texts), strict=True):
        assert ids.tolist() == users.library.encode(text, add_special_tokens=False).ids


def test_added_special_tokens_beside_the_five_and_truncation_do_no_harm():
    made = library("gpt2")
    made.add_special_tokens(["<extra>"])
    made.enable_truncation(4)
    made.enable_padding(length=8, pad_id=1)
    tokenizer = Tokenizer(made)
    (ids,) = tokenizer.encode_batch(["a long enough <extra> text, and longer"])
    assert made.token_to_id("<extra>") not in ids
    assert len(ids) > 8
    made.add_tokens(["ordinary added words"])
    tokenizer = Tokenizer(made)
    assert made.token_to_id("ordinary added words") in tokenizer.encode_batch(["some ordinary added words here"])[0]
    assert tokenizer.vocabulary == made.get_vocab_size(with_added_tokens=True)


def test_ids_anywhere_and_roles_by_name():
    tokenizer = Tokenizer(library("wordpiece"))
    assert [tokenizer.library.id_to_token(number) for number in tokenizer.specials.ids] == BERT
    letters = ["<cls>", "<pad>", "<eos>", "<UNK>", *"LAGVSERTIDPKQNFYMHWC", "<mask>"]
    made = tokenizers.Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, "<UNK>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    with pytest.raises(Refusal, match=r"found no token <unk> or \[UNK\]; wanted all five"):
        Tokenizer(made)
    made.add_special_tokens(["<UNK>"])  # the model's own word for unknown, and marked as special
    tokenizer = Tokenizer(made)
    assert tokenizer.specials.ids == (0, 1, 2, 3, 24)
    assert tokenizer.encode_batch(["MKXV"])[0].tolist() == [20, 15, 3, 7]


def test_characters_that_would_vanish_are_warned_of(tmp_path, capsys):
    for kind in ("gpt2", "bpe without pre-tokens"):
        library(kind).save(str(tmp_path / "tokenizer.json"))
        load_tokenizer(tmp_path)
        assert not capsys.readouterr().err
    made = library("bpe without pre-tokens")
    made.model.unk_token = None
    made.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode_batch(["日"])[0]) < len(
        library("bpe without pre-tokens").encode("日").ids
    )
    assert "without unk_token: characters outside its alphabet vanish" in capsys.readouterr().err


def test_what_cannot_be_loaded(tmp_path, trained):
    with pytest.raises(Refusal, match=r"no tokenizer.json.*latemask tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Refusal, match="tokenizers cannot read"):
        load_tokenizer(tmp_path)
    made = tokenizers.Tokenizer(models.BPE())
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        Refusal, match=rf"{tmp_path}/tokenizer.json: found no token <mask> or \[MASK\]; wanted all five"
    ):
        load_tokenizer(tmp_path)
    trained.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(tmp_path / "tokenizer.json").fingerprint


def test_fingerprint_is_of_what_decides_ids(trained, tmp_path):
    trained.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == trained.fingerprint
    assert len(trained.fingerprint) == 64
    loaded.library.enable_truncation(10)
    loaded.library.enable_padding()
    loaded.library.post_processor = None
    assert fingerprint(loaded.library) == trained.fingerprint
    loaded.library.normalizer = normalizers.NFC()
    assert fingerprint(loaded.library) != trained.fingerprint
    whole = json.loads(trained.library.to_str())
    first, second = list(whole["model"]["vocab"])[300:302]
    vocabulary = whole["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    assert fingerprint(tokenizers.Tokenizer.from_str(json.dumps(whole))) != trained.fingerprint


def test_transformers_reads_it_and_agrees(trained, tmp_path):
    from transformers import PreTrainedTokenizerFast

    trained.save(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), mask_token="<mask>")
    text = "The for statement, and what it does."
    assert theirs(text)["input_ids"] == [0, *trained.encode_batch([text])[0].tolist(), 2]
    assert theirs("a <mask>")["input_ids"][-2] == 4


# Looking words up --------------------------------------------------------------------------------------------------

SPICY = st.text(
    st.one_of(
        st.sampled_from(
            " \n\t\r\x0b\x1c\x1f\x85\xa0\u2003\u3000\u200b\u0301\u0345'.,;:!?\"()-3aAzéİΣßﬁ日\u1100\u1161<>"
        ),
        st.characters(codec="utf-8"),
    ),
    max_size=60,
)


def known_kinds() -> dict[str, Tokenizer]:
    """One of each kind whose words are looked up."""
    if not _known:
        _known["ours, uncased"], _known["ours, cased"] = round_trip(False), round_trip(True)
        _known["gpt2"] = Tokenizer(library("gpt2"))
        _known["wordpiece"] = Tokenizer(library("wordpiece"))
        made = library("wordlevel split at spaces")
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        _known["whitespace"] = Tokenizer(made)
    return _known


_known: dict[str, Tokenizer] = {}


@pytest.mark.parametrize("kind", ["ours, uncased", "ours, cased", "gpt2", "wordpiece", "whitespace"])
@given(texts=st.lists(SPICY, max_size=4))
def test_words_looked_up_are_the_librarys_ids(kind, texts):
    tokenizer = known_kinds()[kind]
    encoder = tokenizer._encoder
    assert encoder.words
    ids, lengths = encoder.encode(texts, end_id=9)
    expected = [[*encoding.ids, 9] for encoding in encoder.library.encode_batch(texts, add_special_tokens=False)]
    assert ids.tolist() == [number for text in expected for number in text]
    assert lengths.tolist() == [len(text) for text in expected]


@given(text=st.text(st.sampled_from("ab \n"), max_size=200), limit=st.integers(2, 20))
def test_pieces_lose_nothing_and_change_no_id(text, limit):
    parts = list(pieces(text, limit))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= limit
    if all(len(word) < limit - 1 for word in text.replace("\n", " ").split(" ")) and "  " not in text.replace(
        "\n", " "
    ):
        tokenizer = round_trip(False)
        ids = np.concatenate(tokenizer.encode_batch(parts))
        assert ids.tolist() == tokenizer.library.encode(text, add_special_tokens=False).ids


def test_the_memo_is_emptied_and_stays_right(monkeypatch):
    monkeypatch.setattr(words, "MEMO_WORDS", 50)
    monkeypatch.setattr(words, "SLICE_CHARACTERS", 300)
    tokenizer = Tokenizer(round_trip(False).library)
    texts = prose().split("\n\n")[:200]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == tokenizer.library.encode(text, add_special_tokens=False).ids
    assert len(tokenizer._encoder._memo) <= 50


def test_which_tokenizers_keep_words_apart():
    def of(change, kind="gpt2"):
        made = library(kind)
        change(made)
        return word_pattern(json.loads(made.to_str()), [*SPECIAL_TOKENS, *BERT])

    assert of(lambda made: None)
    assert not of(lambda made: None, "unigram")
    assert not of(lambda made: None, "bpe without pre-tokens")
    assert not of(lambda made: None, "characters")
    assert not of(lambda made: made.add_tokens(["two words"]))
    assert not of(lambda made: setattr(made, "normalizer", normalizers.StripAccents()))
    assert not of(lambda made: setattr(made, "normalizer", normalizers.Replace(" ", "_")))
    assert not of(lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not of(lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(use_regex=False)))


def test_options_need_no_heavy_import():
    code = "import sys, latemask.text.tokenizer, latemask.text.prepare\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "tokenizers", "pyarrow", "torch", "rich.table"} & set(loaded)


@pytest.mark.parametrize(("vocabulary", "sample_mb"), [(260, 1), ((1 << 20) + 1, 1), (10**24, 1), (300, 0), (300, -1)])
def test_sizes_that_make_no_sense_are_refused(vocabulary, sample_mb, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    named = f"--vocab-size: found {vocabulary}" if sample_mb == 1 else f"--sample-mb: found {sample_mb}"
    with pytest.raises(Refusal, match=f"{named}; wanted at"):
        train_tokenizer([tmp_path / "a.txt"], vocabulary, sample_mb=sample_mb)


def test_half_characters_are_refused_with_what_stands_around():
    unigram = tokenizers.Tokenizer(models.Unigram([*((name, 0.0) for name in SPECIAL_TOKENS), ("a", -1.0)], 3, False))
    for made in (Tokenizer(unigram), Tokenizer(library("gpt2"))):
        wanted = Tokenizer(made.library).encode_batch(["whole again"])
        with pytest.raises(Refusal, match=r"text: found a lone surrogate in 'b \\ud800 c'"):
            made.encode_batch(["whole", "b \ud800 c"])
        assert [ids.tolist() for ids in made.encode_batch(["whole again"])] == [ids.tolist() for ids in wanted]


def test_a_unigram_that_knows_no_unknown_is_refused():
    scores = [*((name, 0.0) for name in SPECIAL_TOKENS), ("a", -1.0)]
    with pytest.raises(Refusal, match="a Unigram model without unk_id"):
        Tokenizer(tokenizers.Tokenizer(models.Unigram(scores, None, False)))


def test_a_tokenizer_that_gives_other_ids_each_time_is_refused(tmp_path):
    from trained import byte_level

    whole = json.loads(byte_level().library.to_str())
    whole["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(Refusal, match=r"tokenizer.json: found a BPE model with a dropout of 0.1"):
        load_tokenizer(tmp_path)
    whole["model"]["dropout"] = 0.0
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert load_tokenizer(tmp_path).vocabulary == byte_level().vocabulary


def test_a_part_of_a_merge_without_an_id_of_its_own_is_refused():
    """Of two tokens with one id the library writes either."""
    tokenizer = byte_level()
    described = json.loads(tokenizer.library.to_str())
    del described["model"]["vocab"][described["model"]["merges"][0][1]]
    with pytest.raises(Refusal, match=r"contradicts itself .*out of vocabulary"):
        words.Encoder(described, tokenizer.special_names.values(), tokenizer.special_names["unk"], np.uint16)
