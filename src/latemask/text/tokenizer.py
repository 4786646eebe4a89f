"""A tokenizer: trained here (byte-level BPE) or the user's own (any ``tokenizer.json`` with the five special tokens).

Text is text: no string in a document ever becomes a special token (see ``words.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from latemask.config import Specials
from latemask.console import progress, say, table, warn
from latemask.errors import Refusal
from latemask.out_of_memory import is_out_of_memory
from latemask.text.blocks import Reading, ReadingFlags, blocks, estimated_text_bytes
from latemask.text.corpus import Counts, read_block, refuse_without_text
from latemask.text.files import find
from latemask.writing import check_free, write_whole

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""Of a tokenizer trained here, in the order of their ids 0..4."""
ROLES = {
    "bos": ("<s>", "[CLS]", "<cls>"),
    "pad": ("<pad>", "[PAD]"),
    "eos": ("</s>", "[SEP]", "<eos>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}
"""Names under which a tokenizer of the user may have each special token; the first that it has counts."""
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 256 + len(SPECIAL_TOKENS), 1 << 20
COMMON_WORDS = 200
SHOWN_CHARACTERS = 20
"""Of a word; words longer than this on average are text without spaces."""
OF_CHARACTERS = (
    "For text without spaces, of which each character is to be a token, bring your own tokenizer.json: "
    "latemask prepare --tokenizer FILE"
)
FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions(ReadingFlags):
    """Train a byte-level BPE tokenizer on text."""

    files: Annotated[tuple[str, ...], Positional]
    """Files, folders or patterns; - for standard input."""
    out: str = "tok"
    """Folder for tokenizer.json."""
    vocab_size: int = 32_768
    """Number of token ids, the five special ones included."""
    cased: bool = False
    """Keep capital letters; otherwise text is lower-cased (accents stay). Both compose characters (Unicode NFC)."""
    sample_mb: int = 512
    """Most text to learn from, in MB (10**6 bytes), read evenly over all files; a few hundred are enough."""
    overwrite: bool = False
    """Replace the tokenizer in the folder."""


class Tokenizer:
    """Raw text to ids and back. Raises ``Refusal`` where one of the five special tokens is missing, naming it."""

    def __init__(self, library: tokenizers.Tokenizer, where: str = "tokenizer"):
        self.library, self.where = library, where
        self._json: dict[str, Any] = json.loads(library.to_str())
        known = library.get_vocab(with_added_tokens=True)
        names = {role: self._name(role, known) for role in ROLES}
        missing = [" or ".join(ROLES[role]) for role, name in names.items() if name is None]
        if missing:
            raise Refusal(where, f"no token {'; no token '.join(missing)}", "all five special tokens",
                          "Add them to the tokenizer with add_special_tokens")  # fmt: skip
        self.special_names: dict[str, str] = {role: name for role, name in names.items() if name}
        self.specials = Specials(**{role: known[name] for role, name in self.special_names.items()})
        self.vocabulary = max(known.values()) + 1
        model = self._json["model"]
        if model["type"] in ("WordPiece", "WordLevel") and model["unk_token"] not in model["vocab"]:
            raise Refusal(where, f"a {model['type']} model without {model['unk_token']} in its vocabulary", "it there")
        if model["type"] == "Unigram" and model["unk_id"] is None:
            raise Refusal(where, "a Unigram model without unk_id", "one, for characters that it does not know")
        if model.get("dropout"):
            raise Refusal(where, f"a BPE model with a dropout of {model['dropout']:g}: other ids for a text each time",
                          "one whose dropout is null")  # fmt: skip

    def _name(self, role: str, known: dict[str, int]) -> str | None:
        """The token of a role: what the model itself calls unknown, then tokens added as special, then any by name."""
        model = self._json["model"]
        special = {added["content"] for added in self._json["added_tokens"] if added["special"]}
        unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
        own = [unknown] if role == "unk" and unknown in {*special, *ROLES["unk"]} else []
        names = [*own, *(name for name in ROLES[role] if name in special), *ROLES[role]]
        return next((name for name in names if name in known), None)

    @cached_property
    def fingerprint(self) -> str:
        """See ``fingerprint``."""
        return fingerprint(self.library)

    @cached_property
    def _encoder(self) -> Any:
        import numpy as np

        from latemask.text.words import Encoder

        dtype = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        return Encoder(self._json, self.special_names.values(), self.special_names["unk"], dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, [tokens] uint16 (uint32 above 65,536 ids), without special tokens around."""
        import numpy as np

        ids, lengths = self.encode_stream(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def encode_stream(self, texts: Sequence[str], end: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """All ids one after the other [tokens] and the number of each text's ids [texts] int64.

        ``end``: each text is followed by ``</s>``, which counts. Raises ``Refusal`` for a text that no UTF-8 can hold.
        """
        try:
            return self._encoder.encode(texts, self.specials.eos if end else None)
        except (TypeError, UnicodeEncodeError):  # what the library makes of a lone surrogate
            for text in texts:
                refuse_surrogates(text)
            raise

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ``ids``, special tokens shown by name."""
        return self.library.decode([int(number) for number in ids], skip_special_tokens=False)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` into ``folder``, aside and renamed."""
        write_whole(Path(folder) / FILE, self.library.to_str(pretty=True))


def refuse_surrogates(text: str) -> None:
    """Raise ``Refusal`` for a text with half a character, as from JSON or from an argument that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise Refusal("text", f"a lone surrogate in {around!r}", "whole characters") from None


def fingerprint(library: tokenizers.Tokenizer) -> str:
    """SHA-256 (hex) of what decides a text's ids: model, normalizer, pre-tokenizer and added tokens, as canonical JSON.

    Truncation, padding, post-processor and decoder are left out: they change with use, and no id's meaning with them.
    """
    whole = json.loads(library.to_str())
    parts = {name: _set_fields(whole.get(name)) for name in ("added_tokens", "model", "normalizer", "pre_tokenizer")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _set_fields(value: Any) -> Any:
    """Without fields that are null or false, so that a field which a later library adds changes nothing."""
    if isinstance(value, dict):
        return {key: _set_fields(item) for key, item in value.items() if item is not None and item is not False}
    return [_set_fields(item) for item in value] if isinstance(value, list) else value


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json`` or a folder that holds one, as it is.

    Raises ``Refusal`` where there is none, it cannot be read, or a special token is missing (see ``ROLES``).
    """
    import tokenizers

    file = Path(path)
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise Refusal(
            path, f"no {FILE}", f"a folder with {FILE}, or that file", "Make one: latemask tokenizer FILES --out tok/"
        )
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise Refusal(file, f"a file that tokenizers cannot read ({error})", "a tokenizer.json") from error
    tokenizer = Tokenizer(library, str(file))
    if _loses_characters(json.loads(library.to_str())):
        warn(f"{file}: a BPE without unk_token: characters outside its alphabet vanish without a trace")
    return tokenizer


def is_of_library(error: BaseException) -> bool:
    """Whether ``error`` may be the tokenizers library's: it raises Exception itself, and what its code in Rust panics
    with is no Exception. Too little memory is nobody's."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _loses_characters(whole: dict[str, Any]) -> bool:
    model = whole["model"]
    if model["type"] != "BPE" or model["unk_token"] is not None or model["byte_fallback"]:
        return False
    return "ByteLevel" not in json.dumps([whole["normalizer"], whole["pre_tokenizer"]])


def untrained(cased: bool) -> tokenizers.Tokenizer:
    """A byte-level BPE with GPT-2's pre-tokens of at most 64 characters and RoBERTa's frame ``<s> text </s>``."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    from latemask.text.words import CAPPED_SPLIT

    library = Tokenizer(models.BPE())
    steps: list[Any] = [normalizers.NFC()] if cased else [normalizers.NFC(), normalizers.Lowercase()]
    library.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    library.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(CAPPED_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    library.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return library


def train_tokenizer(
    files: Sequence[str | os.PathLike[str]],
    vocabulary: int,
    out: str | os.PathLike[str] | None = None,
    *,
    cased: bool = False,
    sample_mb: int = 512,
    reading: Reading | None = None,
    counts: dict[str, Counts] | None = None,
) -> Tokenizer:
    """Train a byte-level BPE of ``vocabulary`` ids on ``files``, and save it in the folder ``out`` where given.

    Of more than ``sample_mb`` MB of text every n-th block of 1 MB is read, the same share of each file; of standard
    input, whose size cannot be known, the beginning. ``counts`` receives what reading met, by file. Raises ``Refusal``
    for a vocabulary that cannot hold the 256 bytes or is beyond 2 ** 20, and for files that hold no text.
    """
    from tokenizers import pre_tokenizers, trainers

    from latemask.text.words import PIECE_CHARACTERS, pieces

    if vocabulary < SMALLEST_VOCABULARY:
        raise Refusal(
            "--vocab-size",
            str(vocabulary),
            f"at least {SMALLEST_VOCABULARY}: 256 bytes and the special tokens",
            OF_CHARACTERS,
        )
    if vocabulary > LARGEST_VOCABULARY:
        raise Refusal("--vocab-size", str(vocabulary), f"at most {LARGEST_VOCABULARY:,}")
    if sample_mb < 1:
        raise Refusal("--sample-mb", str(sample_mb), "at least 1")
    reading = ReadingFlags.of(reading)
    counts = {} if counts is None else counts
    words: Counter[str] = Counter()

    def texts() -> Iterator[str]:
        for number, text in enumerate(_sample(files, reading, sample_mb, counts)):
            if number % 8 == 0:
                words.update(text[: 1 << 16].split())
            yield from pieces(text, PIECE_CHARACTERS)

    library = untrained(cased)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts(), trainer)
    refuse_without_text(counts)
    tokenizer = Tokenizer(library)
    _check_trained(tokenizer, vocabulary, words)
    if out is not None:
        tokenizer.save(out)
    return tokenizer


def _sample(
    inputs: Sequence[str | os.PathLike[str]], reading: Reading, sample_mb: int, counts: dict[str, Counts]
) -> Iterator[str]:
    files = find(inputs, reading)
    sizes = estimated_text_bytes(files, reading)
    known = sum(size for size in sizes if size is not None)
    share = min(1.0, sample_mb * 1e6 / known) if known else 1.0
    with progress("reading", known * share / 1e6 or None, "MB") as advance:
        for file, size in zip(files, sizes, strict=True):
            met = counts.setdefault(file.path, Counts())
            for number, block in enumerate(blocks(file, reading)):
                if int((number + 1) * share) == int(number * share) and number:
                    continue
                documents, more = read_block(block, reading)
                met.add(more)
                advance(len(block.data) / 1e6)
                yield from (document.text for document in documents)
                if size is None and met.text_bytes > sample_mb * 1e6:
                    warn(f"{file.path}: only its first {sample_mb} MB were read")
                    break


def _check_trained(tokenizer: Tokenizer, vocabulary: int, words: Counter[str]) -> None:
    if tokenizer.vocabulary < vocabulary:
        warn(f"{vocabulary:,} ids were asked for, the text gave {tokenizer.vocabulary:,}: no other pair of tokens "
             "comes twice in its words. Give more text, or a smaller --vocab-size")  # fmt: skip
    common = [word for word, _ in words.most_common(COMMON_WORDS)]
    lengths = map(len, tokenizer.encode_batch([f" {word}" for word in common]))
    split = [word for word, length in zip(common, lengths, strict=True) if length > 2]
    if split:
        shown = ", ".join(word[:SHOWN_CHARACTERS] for word in split[:8])
        has_spaces = sum(map(len, split)) < SHOWN_CHARACTERS * len(split)
        warn(f"{len(split)} of the {len(common)} commonest words take more than two tokens: {shown}"
             + ("" if has_spaces else f". {OF_CHARACTERS}"))  # fmt: skip


def run_tokenizer(options: TokenizerOptions) -> None:
    """What ``latemask tokenizer`` does: train, print what was read, and the next command."""
    out = Path(options.out)
    check_free(out, options.overwrite, FILE)
    counts: dict[str, Counts] = {}
    tokenizer = train_tokenizer(options.files, options.vocab_size, out, cased=options.cased,
                                sample_mb=options.sample_mb, reading=options, counts=counts)  # fmt: skip
    columns = ("file", "documents", "empty", "left out", "MB of text read", "repaired bytes")
    rows = [(path, met.handed_on, met.empty, met.left_out, met.text_bytes / 1e6, met.repaired_bytes)
            for path, met in counts.items()]  # fmt: skip
    table(f"{tokenizer.vocabulary:,} ids, {'cased' if options.cased else 'uncased'}, in {out}", columns, rows)
    prepare = ["prepare", *options.files, "--tokenizer", options.out, *options.given(), "--out", "data/en"]
    say(f"Next: latemask {shlex.join(prepare)}")
