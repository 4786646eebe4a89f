"""Task data: every physical row is read or refused by line; labels mean the same whatever the order or the source."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latemask.downstream.glue import read_task
from latemask.downstream.rows import read_table
from latemask.downstream.tasks import GLUE, glue_average, own_task
from latemask.errors import Refusal

RTE = GLUE["rte"]
HEADER = "index\tsentence1\tsentence2\tlabel"


def write(folder, name, lines, end="\n", last_end=True, mark=b""):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = end.join(lines) + (end if last_end else "")
    path.write_bytes(mark + text.encode("utf-8", "surrogateescape"))
    return path


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last_end", [True, False])
def test_quotes_short_rows_and_line_ends(tmp_path, end, last_end, mark):
    lines = [
        HEADER,
        '0\t" a lone quote at the start\tb\tentailment',
        '1\ta lone " in the middle\tb "\tnot_entailment',
        "2\ttoo short\tentailment",
        "",
        "3\tc\td\t",
        "4\tline\u2028separator\x0bkept\x85\te\tentailment",
        "5\tf\tg\tmaybe",
        "6\th\ti\tj\tentailment",
        "7\tk\tl\tnot_entailment",
    ]
    for name in ("train.tsv", "dev.tsv"):
        write(tmp_path, f"RTE/{name}", lines, end, last_end, mark)
    _, examples = read_task(RTE, tmp_path)
    train = examples["train"]
    assert train.texts[0] == ('" a lone quote at the start', "b")
    assert train.texts[2][0] == "line\u2028separator\x0bkept\x85"
    assert train.labels == [0, 1, 0, 1]
    assert [line for line, _ in train.refused] == [4, 5, 6, 8, 9]
    assert len(train) + len(train.refused) == train.physical_rows == len(lines) - 1


cell = st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=["Cs"]), max_size=8)


@settings(deadline=None, max_examples=100)
@given(rows=st.lists(st.lists(cell, min_size=1, max_size=6), max_size=20), end=st.sampled_from(["\n", "\r\n"]))
def test_read_and_refused_add_up_to_the_physical_lines(rows, end, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    good = ["0", "one", "two", "entailment"]
    path = write(folder, "x.tsv", [HEADER, *("\t".join(row) for row in [good, *rows])], end)
    table = read_table(path, ["sentence1", "label"])
    assert table.physical_rows == path.read_bytes().count(b"\n") - 1
    wanted = [row for row in [good, *rows] if len(row) == 4]
    assert table.columns["sentence1"] == [row[1] for row in wanted]


def test_rows_that_are_not_utf8_are_refused_by_line(tmp_path):
    path = write(tmp_path, "x.tsv", [HEADER, "0\t\udcff\tb\tentailment", "1\ta\tb\tentailment"])
    table = read_table(path, ["sentence1"])
    assert table.refused == [(2, "not UTF-8 (byte 2 of the line)")]
    assert table.lines == [3]


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_refused_by_its_name(suffix, encoding, tmp_path):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(("\ufeff" + HEADER + "\n0\ta\tb\tentailment\n").encode(encoding))
    with pytest.raises(Refusal, match=r"UTF-16.*wanted UTF-8.*iconv"):
        read_table(path, ["sentence1"])


def test_names_of_columns_that_are_not_utf8_are_refused(tmp_path):
    path = write(tmp_path, "x.tsv", ["index\tsent\udcffence1\tlabel", "0\ta\tentailment"])
    with pytest.raises(Refusal, match=r"x\.tsv:1.*not UTF-8"):
        read_table(path, ["label"])


def test_csv_and_json_lines(tmp_path):
    comma = tmp_path / "x.csv"
    comma.write_bytes(b'\xef\xbb\xbftext,label\r\n"two\nlines, ""quoted""",yes\r\nshort\r\nplain,no\r\n')
    table = read_table(comma, ["text", "label"])
    assert table.columns == {"text": ['two\nlines, "quoted"', "plain"], "label": ["yes", "no"]}
    assert table.refused == [(4, "1 columns instead of 2")]
    lines = write(tmp_path, "x.jsonl", ['{"text": "a", "label": 1}', "[1]", '{"text": "b"', "", '{"text": "b"}'])
    table = read_table(lines, ["text", "label"])
    assert table.columns["label"] == [1]
    assert [line for line, _ in table.refused] == [2, 3, 4, 5]
    (tmp_path / "open.csv").write_text('text,label\n"never closed,1\n')
    with pytest.raises(Refusal, match=r"open.csv:2.*CSV"):
        read_table(tmp_path / "open.csv", ["text", "label"])


def test_a_wrong_column_or_file_is_named(tmp_path):
    path = write(tmp_path, "x.tsv", [HEADER, "0\ta\tb\tentailment"])
    with pytest.raises(Refusal, match=r"x.tsv:1: found columns index, sentence1.*'gold'"):
        read_table(path, ["gold"])
    with pytest.raises(Refusal, match=r"none.tsv"):
        read_table(tmp_path / "none.tsv", ["a"])
    with pytest.raises(Refusal, match=r"\.tsv, \.csv or \.jsonl"):
        read_table(write(tmp_path, "x.txt", ["a"]), ["a"])
    with pytest.raises(Refusal, match="at least one row"):
        read_table(write(tmp_path, "header.tsv", [HEADER]), ["label"])
    with pytest.raises(Refusal, match="columns found: text"):
        read_table(write(tmp_path, "y.jsonl", ['{"text": "a"}']), ["label"])
    with pytest.raises(Refusal, match=r"train of rte, as RTE/train.tsv"):
        read_task(RTE, tmp_path)
    with pytest.raises(Refusal, match=r"nowhere: found no such folder; wanted the folder of rte or the one above it"):
        read_task(RTE, tmp_path / "nowhere")


@pytest.mark.parametrize(("name", "separator", "called"), [
    ("semi.csv", ";", "semicolons"), ("tab.csv", "\t", "tabs"), ("bar.csv", "|", "bars"), ("comma.tsv", ",", "commas"),
    ("semi.tsv", ";", "semicolons"),
])  # fmt: skip
@pytest.mark.parametrize("quote", ["", '"'])
def test_columns_parted_by_another_character_are_told_from_missing_ones(tmp_path, name, separator, called, quote):
    lines = [separator.join(f"{quote}{cell}{quote}" for cell in row) for row in (("text", "label"), ("a film", "good"))]
    wanted = rf"{name}:1: found columns parted by {called}; wanted commas in \.csv or tabs in \.tsv"
    with pytest.raises(Refusal, match=wanted):
        read_table(write(tmp_path, name, lines), ["text", "label"])
    with pytest.raises(Refusal, match=wanted):
        read_table(write(tmp_path, name, lines), ["text", "mood"])


def test_a_column_whose_name_holds_another_separator_is_read(tmp_path):
    path = write(tmp_path, "one.csv", ["text;label", "a film;good"])
    assert read_table(path, ["text;label"]).columns == {"text;label": ["a film;good"]}
    with pytest.raises(Refusal, match=r"one.csv:1: found columns text;label; wanted one column 'mood'"):
        read_table(path, ["mood"])


def own(folder, train, dev, kind="classification", texts=("text",)):
    for name, rows in (("train", train), ("dev", dev)):
        write(folder, f"{name}.jsonl", [json.dumps(row) for row in rows])
    return read_task(own_task(kind, texts, "label", "train.jsonl", "dev.jsonl"), folder)


def test_own_labels_are_sorted_whatever_their_order_and_form(tmp_path):
    rows = [{"text": str(label), "label": label} for label in (10, "2", 1, True, "x")]
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        task, examples = own(tmp_path, rows, rows[:2])
        assert task.labels == ("1", "2", "10", "true", "x")
        assert {texts[0]: task.labels[label] for texts, label in zip(examples["train"].texts, examples["train"].labels,
                strict=True)} == {"10": "10", "2": "2", "1": "1", "True": "true", "x": "x"}  # fmt: skip


def test_own_labels_that_cannot_be_used(tmp_path):
    good = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    with pytest.raises(Refusal, match=r"dev.jsonl:2: found label 'z', unseen in training; wanted one of x, y"):
        own(tmp_path, good, [good[0], {"text": "a", "label": "z"}])
    with pytest.raises(Refusal, match="one class, 'x'"):
        own(tmp_path, good[:1], good)
    _, examples = own(tmp_path, [*good, {"text": "c", "label": " "}, {"text": 5, "label": "x"}], good)
    assert examples["train"].refused == [(3, "no label"), (4, "a number in column 'text', not a text")]
    with pytest.raises(Refusal, match="not a finite number"):
        own(tmp_path, [{"text": "a", "label": "nan"}], good, kind="regression")
    with pytest.raises(Refusal, match="1 columns; wanted 2 for similarity"):
        own_task("similarity", ["text"], "label", "a", "b")
    with pytest.raises(Refusal, match="different columns"):
        own_task("classification", ["label"], "label", "a", "b")


def test_what_names_no_class_is_refused_by_row(tmp_path):
    lines = ['{"text": "a", "label": NaN}', '{"text": "b", "label": ["x", "y"]}', '{"text": "c", "label": {"x": 1}}',
             '{"text": "d", "label": "\\ud800"}', '{"text": "\\udfff", "label": "x"}', f'{{"label": {"9" * 5000}}}',
             *(f'{{"text": "e", "label": "{label}"}}' for label in ("--5", "x", "7" * 5000, "3", "-4"))]  # fmt: skip
    for name in ("train", "dev"):
        write(tmp_path, f"{name}.jsonl", lines)
    task, examples = read_task(own_task("classification", ("text",), "label", "train.jsonl", "dev.jsonl"), tmp_path)
    assert task.labels == ("-4", "3", "--5", "7" * 5000, "x")
    reasons = dict(examples["train"].refused)
    assert [reasons[line] for line in (1, 4, 5)] == [
        "label NaN, not a class", "a lone surrogate in 'label'", "a lone surrogate in 'text'"]  # fmt: skip
    assert "not a class" in reasons[2]
    assert "not a class" in reasons[3]
    assert reasons[6] == "JSON with a number of too many digits"
    rows = [
        {"text": ["a", "b"], "label": ["x", None]},
        {"text": ["a"], "label": ["x"]},
        {"text": ["a"], "label": ["y"]},
    ]
    _, examples = own(tmp_path, rows, rows, kind="tokens")
    assert examples["train"].refused == [(1, "a word's label that is no class")]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_two_columns_of_one_name_are_refused_where_that_name_is_asked_for(suffix, tmp_path):
    cut = "," if suffix == "csv" else "\t"
    path = write(tmp_path, f"a.{suffix}", [cut.join(("text", "text", "label ", "id")), cut.join("abcd")])
    with pytest.raises(Refusal, match=r":1: found columns text, text, 'label ', id; wanted one column 'text'"):
        read_table(path, ["text"])
    with pytest.raises(Refusal, match="one column 'text'"):
        read_table(path, ["id"], optional=["text"])
    assert read_table(path, ["id"], optional=["id"]).columns == {"id": ["d"]}


def test_metrics_and_names_that_do_not_fit_are_refused_before_anything_runs(tmp_path):
    for kind, metric in (
        ("classification", "wrong"),
        ("classification", "span_f1"),
        ("classification", "spearman"),
        ("regression", "accuracy"),
        ("similarity", "matthews"),
        ("tokens", "f1"),
    ):
        texts = ["a", "b"] if kind == "similarity" else ["a"]
        with pytest.raises(Refusal, match=rf"--metrics: found {metric}; wanted .* for {kind}"):
            own_task(kind, texts, "label", "x", "y", metrics=[metric])
    for name in ("rte", "squad2", "glue", "", "../up", "a b"):
        with pytest.raises(Refusal, match="--name"):
            own_task("classification", ["a"], "label", "x", "y", name=name)
    rows = [{"text": "a", "label": label} for label in "xyz"]
    task = own_task("classification", ["text"], "label", "train.jsonl", "dev.jsonl", metrics=["f1"])
    for name in task.files.values():
        write(tmp_path, name, [json.dumps(row) for row in rows])
    with pytest.raises(Refusal, match="f1, of 3 classes; wanted macro_f1"):
        read_task(task, tmp_path)
    for name in task.files.values():
        write(tmp_path, name, [json.dumps(row) for row in rows[:2]])
    assert read_task(task, tmp_path)[0].labels == ("x", "y")


def test_words_and_their_labels(tmp_path):
    rows = [
        {"text": ["New", "York"], "label": ["B-L", "I-L"]},
        {"text": "it is", "label": "O O"},
        {"text": "a b", "label": "O"},
    ]
    task, examples = own(tmp_path, rows, rows[1:2], kind="tokens")
    assert task.labels == ("B-L", "I-L", "O")
    assert examples["train"].texts == [(["New", "York"],), (["it", "is"],)]
    assert examples["train"].labels == [[0, 1], [2, 2]]
    assert examples["train"].refused == [(3, "2 words and 1 labels")]


def test_hub_data_mean_the_same_as_the_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({
        "sentence1": datasets.Value("string"), "sentence2": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["equivalent", "not_equivalent"]),  # not the order of the task
    })  # fmt: skip
    rows = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [0, 1]}
    for split in ("train", "validation"):
        datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "hub" / f"{split}.parquet")
    for name in ("train", "dev"):
        write(
            tmp_path,
            f"MRPC/{name}.tsv",
            ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t0\t0\ta\tc", "0\t0\t0\tb\td"],
        )
    _, from_hub = read_task(GLUE["mrpc"], f"hub:{tmp_path / 'hub'}")
    _, from_files = read_task(GLUE["mrpc"], tmp_path)
    for split in ("train", "dev"):
        assert from_hub[split].texts == from_files[split].texts == [("a", "c"), ("b", "d")]
        assert from_hub[split].labels == from_files[split].labels == [1, 0]
    with pytest.raises(Refusal, match="a column 'question'"):
        read_task(GLUE["qnli"], f"hub:{tmp_path / 'hub'}")


def test_a_data_set_that_the_hub_does_not_give_is_named_whole(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*place: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for data, where in (("hub:", "--data hub:nyu-mll/glue/mrpc"), ("hub:a/b", "--data hub:a/b")):
        with pytest.raises(Refusal, match="found no network") as refused:
            read_task(GLUE["mrpc"], data)
        assert refused.value.where == where


def test_tasks_of_ones_own_on_the_hub_name_their_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    from latemask.downstream.options import FinetuneOptions
    from latemask.downstream.runner import tasks_of

    items = datasets.ClassLabel(names=["O", "B-L"])
    listed = datasets.Sequence(items)
    features = datasets.Features({"words": datasets.Sequence(datasets.Value("string")), "tags": listed})
    for split, word in (("train", "a"), ("validation", "b"), ("test", "c")):
        rows = {"words": [[word, "York"]], "tags": [[0, 1]]}
        datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / f"{split}.parquet")
    data = f"hub:{tmp_path}"
    for dev, word in (("", "b"), ("test", "c")):
        [task] = tasks_of(FinetuneOptions("x", ("own",), data, kind="tokens", texts=("words",), label="tags", dev=dev))
        task, examples = read_task(task, data)
        assert examples["train"].texts == [(["a", "York"],)]
        assert examples["dev"].texts == [([word, "York"],)]
        assert task.labels == ("B-L", "O")  # names, not numbers: spans need them
        assert examples["dev"].labels == [[1, 0]]
    [task] = tasks_of(FinetuneOptions("x", ("own",), data, texts=("words",), label="tags", train="none"))
    with pytest.raises(Refusal, match="splits train, validation, test; wanted a split 'none'"):
        read_task(task, data)
    [task] = tasks_of(FinetuneOptions("x", ("mnli",), data, train="test"))
    assert task.hub_splits == {
        "train": "test",
        "matched": "validation_matched",
        "mismatched": "validation_mismatched",
    }


def test_table_1():
    assert list(GLUE) == ["mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb"]
    metrics = {name: task.metrics[0] for name, task in GLUE.items()}
    assert metrics.pop("cola") == "matthews"
    assert metrics.pop("stsb") == "spearman"
    assert set(metrics.values()) == {"accuracy"}
    assert {name for name, task in GLUE.items() if "f1" in task.metrics} == {"mrpc", "qqp"}
    roberta = dict(zip(GLUE, (85.9, 91.6, 92.3, 93.7, 64.3, 75.5, 88.7, 89.5), strict=True))
    assert round(glue_average(roberta), 1) == 85.2  # "RoBERTa (Ours)", base
    del roberta["rte"]
    assert glue_average(roberta) is None


def test_a_count_below_the_official_one_marks_the_split():
    assert GLUE["qnli"].subset({"train": 10_293, "dev": 5_463}) == {"train": "10,293 of 104,743"}
    assert RTE.subset({"train": 2_490, "dev": 277}) == {}
    assert GLUE["mnli"].subset({"train": 392_702, "matched": 9_814, "mismatched": 9_832}) == {
        "matched": "9,814 of 9,815"
    }


def test_data_have_a_fingerprint_of_their_contents(tmp_path):
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    _, first = own(tmp_path, rows, rows)
    _, again = own(tmp_path, rows, rows[::-1])
    assert first["train"].fingerprint() == again["train"].fingerprint() != again["dev"].fingerprint()
    assert len(first["train"].first(1)) == first["train"].first(1).physical_rows == 1
