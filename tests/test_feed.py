"""The feed: rows and masks follow from (seed, epoch, row) alone, whoever asks and in whatever split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from latemask.batch import Batch
from latemask.config import Masking, Shape, Specials
from latemask.errors import Refusal
from latemask.feed.batches import Rows, TrainingBatches, ValidationBatches
from latemask.feed.masking import lay_out, noise, permuted
from latemask.joins import late
from latemask.recipes import recipe
from samples import Stream, prose, stream_of

SHAPE = Shape(depth=1, width=8, heads=1, feedforward=8, row_tokens=32, vocabulary=90,
              specials=Specials(bos=3, pad=0, eos=7, unk=1, mask=5))  # fmt: skip
SPECIALS = np.array(SHAPE.specials.ids)
MASKED = 10
MASKING = Masking(rate=MASKED / 32)


def feed(
    masking: Masking = MASKING, batch_rows: int = 8, seed: int = 3, stream: Stream | None = None
) -> TrainingBatches:
    rows = Rows(stream or prose(SHAPE), SHAPE, masking.masked_tokens(32))
    return TrainingBatches(rows, masking, batch_rows, seed)


def same(a: Batch, b: Batch) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("ids", "positions", "seats", "filler", "document")
    )


def joined(*batches: Batch) -> Batch:
    parts = ("ids", "positions", "seats", "filler", "document")
    return Batch(*(torch.cat([getattr(batch, name) for batch in batches]) for name in parts))


def natural(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Ids in their order [B, N], and which of them are masked."""
    ids, masked = np.zeros(batch.ids.shape, np.int64), np.zeros(batch.ids.shape, bool)
    for b in range(batch.rows):
        for n, position in enumerate(batch.positions[b].tolist()):
            ids[b, position] = batch.ids[b, n]
            masked[b, position] = n >= batch.n_visible
    return ids, masked


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations above what equal chances give."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


# --- noise and order --------------------------------------------------------------------------------------------------


def splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5))
def test_noise_is_the_same_in_whole_python_numbers(keys):
    state, golden = 0, 0x9E3779B97F4A7C15
    for key in keys:
        state = splitmix(((state + golden) % 2**64) ^ splitmix((key + golden) % 2**64))
    assert noise(*keys) % 2**64 == state
    arrays = [np.array([key]) for key in keys]
    assert int(noise(*arrays)[0]) == int(noise(*map(torch.from_numpy, arrays))[0]) == noise(*keys)


def test_noise_never_changes_between_versions():
    """Other numbers here would mean that a run resumed with a newer version sees other data."""
    found = [noise(0) % 2**64, noise(1, 2, 3) % 2**64, noise(24301, 2, 7, 123456789, 511) % 2**64]
    assert found == [0x397AB29740681D9, 0x3F53A1FE784BBF, 0xE21282E98C69B51D]
    assert permuted(np.arange(10), 10, 0, np.array(0)).tolist() == [7, 6, 9, 2, 5, 4, 3, 0, 8, 1]
    assert permuted(np.array([0, 1, 999_999_999]), 10**9, 7, np.array(3)).tolist() == [229300459, 256268708, 540372648]
    layout = lay_out(
        torch.tensor([[0, *range(10, 21)], [0, *range(30, 36), 2, *range(40, 44)]]),
        Masking(rate=0.5, filler=(0.4, 0.3, 0.3)), Specials(), 100, seed=5, epoch=torch.tensor([0, 3]),
        row=torch.tensor([8, 9]),
    )  # fmt: skip
    assert layout.positions.tolist() == [[0, 3, 4, 6, 8, 11, 9, 1, 10, 7, 5, 2], [0, 3, 4, 6, 7, 8, 2, 11, 5, 1, 10, 9]]
    assert layout.filler.tolist() == [[18, 10, 4, 52, 14, 29], [4, 4, 4, 4, 4, 56]]


def test_noise_broadcasts_and_every_key_matters():
    grid = noise(1, np.arange(3)[:, None], np.arange(4))
    assert grid.shape == (3, 4)
    assert len(set(grid.ravel().tolist())) == 12
    assert grid[2, 1] == noise(1, 2, 1)
    assert noise(1, 2) != noise(2, 1)


def test_noise_bits_are_even():
    bits = noise(0, np.arange(20_000))
    ones = np.array([((bits >> bit) & 1).sum() for bit in range(64)])
    assert np.abs(ones.astype(int) - 10_000).max() < 5 * 20_000**0.5 / 2


@given(st.integers(1, 400), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_the_order_of_rows_is_a_permutation(size, seed, epoch):
    found = permuted(np.arange(size), size, seed, np.array(epoch))
    assert sorted(found.tolist()) == list(range(size))


@settings(max_examples=30)
@given(st.integers(20, 400), st.integers(0, 2**63 - 2), st.integers(0, 1000))
def test_the_order_of_rows_depends_on_seed_and_epoch(size, seed, epoch):
    found = permuted(np.arange(size), size, seed, np.array(epoch)).tolist()
    assert found != permuted(np.arange(size), size, seed, np.array(epoch + 1)).tolist()
    assert found != permuted(np.arange(size), size, seed + 1, np.array(epoch)).tolist()
    assert found != list(range(size))


def test_each_row_has_every_place_equally_often():
    epochs = np.arange(6000)
    for index in (0, 5, 11):
        places = permuted(np.full(6000, index), 12, 1, epochs)
        assert abs(chi_square(np.bincount(places, minlength=12))) < 5


# --- masks ------------------------------------------------------------------------------------------------------------


@st.composite
def maskings(draw: st.DrawFn) -> Masking:
    kinds = st.sampled_from([(1.0, 0.0, 0.0), (0.8, 0.1, 0.1), (0.0, 1.0, 0.0), (0.0, 0.5, 0.5)])
    return Masking(rate=draw(st.floats(0.05, 0.6)), filler=draw(kinds), aligned=draw(st.booleans()))


@given(maskings(), st.integers(0, 2**63 - 1), st.integers(0, 9))
def test_every_row_masks_exactly_m_ordinary_tokens_and_loses_nothing(masking, seed, index):
    batches = feed(masking, seed=seed)
    batch = batches.batch_at(index)
    masked_tokens = masking.masked_tokens(32)
    assert batch.filler.shape == (8, masked_tokens)
    assert not np.isin(batch.targets.numpy(), SPECIALS).any()
    assert (batch.positions.sort(1).values == torch.arange(32)).all()
    ids, masked = natural(batch)
    assert (masked.sum(1) == masked_tokens).all()
    _, rows = batches.keys_at(index)
    assert (ids == batches.rows.ids(rows)).all()
    assert (ids[:, 0] == SHAPE.specials.bos).all()
    visible = batch.positions[:, : batch.n_visible]
    assert (visible.diff(dim=1) > 0).all()
    if masking.aligned:
        assert torch.equal(batch.seats, batch.positions)
    else:
        assert (batch.seats == torch.arange(32)).all()


def test_rows_are_the_stream_cut_in_order():
    stream = prose(SHAPE)
    rows = Rows(stream, SHAPE, MASKED)
    for row in (0, 3, rows.count - 1):
        number = int(rows.row_number(np.array([row]))[0])
        assert rows.ids(np.array([number]))[0].tolist() == [3, *stream.tokens[number * 31 : number * 31 + 31].tolist()]


def test_every_ordinary_token_is_masked_equally_often_and_in_any_order():
    ids = np.tile(np.r_[3, np.arange(10, 41)], (8000, 1))
    ids[:, [6, 20]] = 7
    layout = lay_out(torch.from_numpy(ids), MASKING, SHAPE.specials, 90, seed=1, epoch=torch.zeros(8000).long(),
                     row=torch.arange(8000))  # fmt: skip
    masked = layout.positions[:, -MASKED:].numpy()
    counts = np.bincount(masked.ravel(), minlength=32)
    assert (counts[[0, 6, 20]] == 0).all()
    ordinary = np.delete(np.arange(32), [0, 6, 20])
    # Without replacement within a row, so less spread than a chi-square: far from equal would still be far above.
    assert chi_square(counts[ordinary]) < 3
    for place in (0, MASKED // 2, MASKED - 1):
        assert abs(chi_square(np.bincount(masked[:, place], minlength=32)[ordinary])) < 5
    pairs = np.bincount(np.searchsorted(ordinary, masked[:, 0]) * 29 + np.searchsorted(ordinary, masked[:, 1]),
                        minlength=29 * 29).reshape(29, 29)  # fmt: skip
    assert abs(chi_square(pairs[~np.eye(29, dtype=bool)])) < 5
    assert pairs.trace() == 0


def test_masks_differ_between_epochs_rows_and_seeds_and_repeat_otherwise():
    rows = feed().rows
    numbers = np.arange(4)

    def positions(seed: int, epoch: int, rows_of: np.ndarray = numbers) -> torch.Tensor:
        return rows.batch(rows_of, MASKING, seed, np.full(len(rows_of), epoch)).positions

    assert torch.equal(positions(1, 0), positions(1, 0))
    assert (positions(1, 0) != positions(1, 1)).any(1).all()
    assert (positions(1, 0) != positions(2, 0)).any(1).all()
    assert torch.equal(positions(1, 0)[2:3], positions(1, 0, np.array([2])))
    assert len({tuple(row) for row in positions(1, 0).tolist()}) == 4


def test_the_mask_id_never_stands_among_visible_tokens_over_a_whole_epoch():
    batches = feed(replace(MASKING, joins=late()))
    for index in range(-(-batches.rows.count // 8)):
        batch = batches.batch_at(index)
        assert not (batch.ids == SHAPE.specials.mask).any()
        assert (batch.filler == SHAPE.specials.mask).all()


@pytest.mark.parametrize(
    "filler", [(1.0, 0.0, 0.0), (0.8, 0.1, 0.1), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.5, 0.5)]
)
def test_fillers_keep_their_shares_and_are_never_special(filler):
    shape = replace(SHAPE, vocabulary=5000)
    stream = stream_of([31] * 2000, shape)
    rows = Rows(stream, shape, MASKED)
    batch = rows.batch(np.arange(2000), replace(MASKING, filler=filler), 0, np.zeros(2000, int))
    shows, targets = batch.filler.numpy(), batch.targets.numpy()
    is_mask, is_own = shows == shape.specials.mask, shows == targets
    is_random = ~is_mask & ~is_own
    assert np.abs(np.array([is_mask.mean(), is_random.mean(), is_own.mean()]) - filler).max() < 0.01
    assert not np.isin(shows[~is_mask], SPECIALS).any()
    assert shows.min() >= 0
    assert shows.max() < 5000
    # The kind does not depend on the place among the masked tokens: a join takes a fair sample.
    if filler == (0.0, 0.5, 0.5):
        assert np.abs(is_own.mean(0) - 0.5).max() < 5 * 0.5 / 2000**0.5


def test_random_fillers_are_even_over_the_ordinary_ids():
    stream = stream_of([31] * 3000, SHAPE)
    rows = Rows(stream, SHAPE, MASKED)
    batch = rows.batch(np.arange(3000), replace(MASKING, filler=(0.0, 1.0, 0.0)), 0, np.zeros(3000, int))
    counts = np.bincount(batch.filler.numpy().ravel(), minlength=90)
    assert (counts[SPECIALS] == 0).all()
    assert abs(chi_square(np.delete(counts, SPECIALS))) < 5


def test_the_caller_s_rows_are_left_alone():
    ids = np.tile(np.r_[3, np.arange(10, 41)], (2, 1))
    before = ids.copy()
    layout = lay_out(torch.from_numpy(ids), MASKING, SHAPE.specials, 90, seed=0, epoch=torch.zeros(2).long(),
                     row=torch.arange(2))  # fmt: skip
    layout.ids.add_(1)
    layout.filler.add_(1)
    assert (ids == before).all()


def test_a_row_with_too_few_ordinary_tokens_is_refused_with_its_number():
    ids = np.full((2, 32), 10)
    ids[1, :23] = 7
    with pytest.raises(Refusal, match="9 tokens that may be masked in row 8"):
        lay_out(torch.from_numpy(ids), MASKING, SHAPE.specials, 90, seed=0, epoch=torch.zeros(2).long(),
                row=torch.tensor([7, 8]))  # fmt: skip


def test_an_id_outside_the_vocabulary_is_refused_with_its_row():
    stream = prose(SHAPE)
    stream.tokens[3 * 31 + 5] = 90
    rows = Rows(stream, SHAPE, MASKED, "data/en")
    assert rows.ids(np.array([2, 4])).shape == (2, 32)
    with pytest.raises(Refusal, match="data/en, row 3: found id 90; wanted ids below 90"):
        rows.ids(np.array([2, 3]))


def test_document_numbers_count_the_ends_before_a_token():
    rows = Rows(stream_of([5, 1, 40, 16], SHAPE), SHAPE, MASKED)
    batch = rows.batch(np.array([0, 1]), MASKING, 0, np.zeros(2, int))
    found = np.zeros((2, 32), int)
    np.put_along_axis(found, batch.positions.numpy(), batch.document.numpy(), 1)
    assert found[0].tolist() == [0] * 6 + [1] + [2] * 25
    assert found[1].tolist() == [0] * 16 + [1] * 16


# --- rows that cannot carry the masks ---------------------------------------------------------------------------------


def test_a_stream_shorter_than_a_row_is_refused_with_both_numbers():
    with pytest.raises(Refusal, match=r"data/en: found 30 tokens; wanted 31 for one row"):
        Rows(stream_of([30], SHAPE), SHAPE, MASKED, where="data/en")
    assert Rows(stream_of([31], SHAPE), SHAPE, MASKED).count == 1


@given(st.integers(31, 400))
def test_tokens_in_rows_and_dropped_tokens_add_up(tokens):
    rows = Rows(stream_of([tokens], SHAPE), SHAPE, MASKED)
    assert rows.count * 31 + rows.dropped_tokens == tokens
    assert 0 <= rows.dropped_tokens < 31


def short_rows_of(stream: Stream) -> list[int]:
    """Rows with fewer than M ordinary tokens, looked up one token at a time."""
    short = []
    for row in range(len(stream.tokens) // 31):
        ordinary = sum(int(token) not in SHAPE.specials.ids for token in stream.tokens[row * 31 : row * 31 + 31])
        if ordinary < MASKED:
            short.append(row)
    return short


@settings(max_examples=40)
@given(st.lists(st.sampled_from([1, 1, 1, 2, 30, 31]), min_size=40, max_size=120), st.booleans())
def test_rows_with_too_few_ordinary_tokens_are_counted_and_never_drawn(lengths, has_unknown):
    assume(sum(lengths) >= 31)
    stream = stream_of(lengths, SHAPE)
    if has_unknown:
        ordinary = np.flatnonzero(stream.tokens != SHAPE.specials.eos)
        stream.tokens[ordinary[::2]] = SHAPE.specials.unk
        stream.unknown_tokens = len(ordinary[::2])
    short, total = short_rows_of(stream), sum(lengths) // 31
    if len(short) == total:
        with pytest.raises(Refusal, match=f"{total} rows, each with fewer than {MASKED} tokens that may be masked"):
            Rows(stream, SHAPE, MASKED)
        return
    rows = Rows(stream, SHAPE, MASKED)
    assert rows.refused.tolist() == short
    assert rows.count == total - len(short)
    batches = TrainingBatches(rows, MASKING, 3 * rows.count, seed=0)
    assert sorted(batches.keys_at(0)[1].tolist()) == sorted(3 * [row for row in range(total) if row not in short])
    batches.batch_at(0)


def test_unknown_tokens_are_found_in_a_stream_of_many_rows():
    stream = stream_of([31] * 9000, SHAPE)
    for row in (0, 4095, 4096, 8999):
        stream.tokens[row * 31 : row * 31 + 30] = SHAPE.specials.unk
    stream.unknown_tokens = 120
    assert Rows(stream, SHAPE, MASKED).refused.tolist() == [0, 4095, 4096, 8999]


# --- batches ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 40), st.integers(0, 8), st.integers(0, 8))
def test_any_split_of_a_batch_holds_the_same_rows(index, a, b):
    a, b = sorted((a, b))
    batches = feed()
    parts = [batches.batch_at(index, start, stop) for start, stop in ((0, a), (a, b), (b, 8)) if start < stop]
    assert same(joined(*parts), batches.batch_at(index))


@pytest.mark.parametrize(("small", "large"), [(2, 8), (3, 12), (5, 10)])
def test_the_size_of_a_batch_does_not_change_the_rows(small, large):
    few, many = feed(batch_rows=small), feed(batch_rows=large)
    for index in range(12):
        share = large // small
        parts = [few.batch_at(index * share + part) for part in range(share)]
        assert same(joined(*parts), many.batch_at(index))


def test_batches_straddle_epochs_and_each_epoch_holds_each_row_once():
    batches = feed(batch_rows=7)
    count = batches.rows.count
    assert count % 7
    keys = [key for index in range(count) for key in zip(*map(np.ndarray.tolist, batches.keys_at(index)), strict=True)]
    usable = batches.rows.row_number(np.arange(count)).tolist()
    for epoch in range(7):
        rows = [row for key_epoch, row in keys[epoch * count : (epoch + 1) * count] if key_epoch == epoch]
        assert sorted(rows) == usable
    assert len({tuple(row for epoch, row in keys if epoch == number) for number in range(7)}) == 7
    index = count // 7
    assert set(batches.keys_at(index)[0].tolist()) == {0, 1}
    first = batches.epoch_of(index) * count
    assert first == index * 7
    whole = batches.batch_at(index)
    for place in range(7):
        epoch, row = batches.keys_at(index, place, place + 1)
        assert same(batches.rows.batch(row, MASKING, 3, epoch), whole.slice(place, place + 1))


def test_a_corpus_of_one_row_feeds_any_batch():
    batches = feed(stream=stream_of([31], SHAPE), batch_rows=5)
    batch = batches.batch_at(3)
    assert batches.keys_at(3)[0].tolist() == [15, 16, 17, 18, 19]
    assert len({tuple(row) for row in batch.positions.tolist()}) == 5


def test_sources_are_those_of_a_walk_along_the_stream():
    lengths = [3, 50, 1, 20, 31, 44, 2, 90]
    stream = stream_of(lengths, SHAPE, sources=[0, 1, 2, 0, 3, 1, 1, 2])
    source_of = [source for length, source in zip(lengths, stream.sources, strict=True) for _ in range(length)]
    validation = ValidationBatches(Rows(stream, SHAPE, MASKED), MASKING, most=100)
    batch = validation.batch(0, len(validation))
    found = validation.sources(0, len(validation), batch)
    for b, row in enumerate(validation.numbers.tolist()):
        for m, position in enumerate(batch.positions[b, batch.n_visible :].tolist()):
            assert found[b, m] == source_of[row * 31 + position - 1]
            assert batch.targets[b, m] == stream.tokens[row * 31 + position - 1]
    everywhere = validation.rows.sources(
        np.arange(validation.rows.count), np.tile(np.arange(1, 32), (validation.rows.count, 1))
    )
    assert everywhere.ravel().tolist() == source_of[: everywhere.size]
    assert ValidationBatches(Rows(prose(SHAPE), SHAPE, MASKED), MASKING, 4).sources(0, 1, batch.slice(0, 1)) is None


def test_validation_is_the_same_rows_and_masks_every_time_spread_over_the_split():
    stream = prose(SHAPE, documents=200)
    rows = Rows(stream, SHAPE, MASKED)
    first, second = ValidationBatches(rows, MASKING, 9), ValidationBatches(Rows(stream, SHAPE, MASKED), MASKING, 9)
    assert len(first) == 9
    assert same(first.batch(0, 9), second.batch(0, 9))
    assert same(joined(first.batch(0, 4), first.batch(4, 9)), second.batch(0, 9))
    assert len(set(first.numbers.tolist())) == 9
    assert first.numbers[0] == 0
    assert first.numbers[-1] > 0.8 * rows.count
    assert len(ValidationBatches(rows, MASKING, 10**6)) == rows.count


@pytest.mark.parametrize("rate", [0.15, 0.4, 0.5, 0.8])
def test_the_rate_is_the_share_that_is_masked(rate):
    masking = Masking(rate=rate)
    rows = Rows(stream_of([31] * 300, SHAPE), SHAPE, masking.masked_tokens(32))
    batch = TrainingBatches(rows, masking, 300, 0).batch_at(0)
    assert abs(batch.n_masked / 32 - rate) <= 0.5 / 32


def test_tokens_of_four_bytes_feed_as_well():
    stream = prose(SHAPE)
    wide = Stream(stream.tokens.astype(np.uint32), stream.starts)
    assert same(feed(stream=wide).batch_at(0), feed(stream=stream).batch_at(0))


def test_a_row_of_a_real_recipe_is_as_long_as_its_plan_says():
    run = recipe("mae_lm_tiny")
    rows = Rows(prose(run.shape), run.shape, run.masked_tokens)
    batch = TrainingBatches(rows, run.masking, 4, 0).batch_at(0)
    assert (batch.n_visible, batch.n_masked) == (run.visible_tokens, run.masked_tokens) == (109, 19)
