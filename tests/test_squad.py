"""SQuAD: no token or answer is lost between windows, offsets are exact in any script, shared questions are refused."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latemask.config import replace
from latemask.downstream.finetune import Bench, result_of
from latemask.downstream.inputs import Inputs
from latemask.downstream.options import FinetuneOptions
from latemask.downstream.runner import finetune
from latemask.downstream.settings import Settings
from latemask.downstream.squad import (
    Question,
    Squad,
    SquadProblem,
    Window,
    ends_of,
    make_windows,
    read_answers,
    read_squad,
    refuse_shared,
)
from latemask.errors import Refusal
from latemask.recipes import recipe
from test_finetune import TINY, tiny_model
from trained import byte_level, write_run

SETTINGS = Settings(sequence_tokens=48, stride_tokens=8, query_tokens=10, answer_tokens=6)


def entry(name, question, context, *answers):
    held = [{"text": text, "answer_start": context.index(text)} for text in answers]
    return {"id": name, "question": question, "answers": held, "is_impossible": not answers}


def write_squad(path, paragraphs):
    """``paragraphs``: (context, [entries])."""
    held = [{"context": context, "qas": entries} for context, entries in paragraphs]
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": held}]}))
    return read_squad(path)


def squad_of(context, *questions):
    made = [Question(str(number), text, 0, answers) for number, (text, *answers) in enumerate(questions)]
    return Squad("memory", [context], [dataclasses.replace(q, answers=tuple(q.answers)) for q in made], [])


scripts = st.text(
    st.one_of(
        st.sampled_from("aA eé.,'\"()- \n\t\u00a0İıßǅ\u0301\u200d👩👨‍👧🇫🇷日本語עבריתहिन्दी\U0001f9ff\ufeff<s>"),
        st.characters(exclude_categories=["Cs"]),
    ),
    min_size=1,
    max_size=120,
)


@given(scripts)
def test_every_character_lies_in_a_token_that_a_window_holds(context):
    inputs = Inputs(byte_level(), 30)
    squad = squad_of(context, ("who",))
    windows = make_windows(squad, inputs, SETTINGS)
    [encoding] = inputs.encodings([context])
    assert encoding.ids == inputs.tokenizer.encode_batch([context])[0].tolist()
    seen: dict[int, tuple[int, int]] = {}
    for window in windows:
        assert len(window.ids) <= 30
        for place, offsets in enumerate(window.offsets.tolist()):
            assert seen.setdefault(window.starts + place, tuple(offsets)) == tuple(offsets)
            assert window.ids[window.first + place] == encoding.ids[window.starts + place]
    assert sorted(seen) == list(range(len(encoding.ids)))
    covered = {character for begin, stop in seen.values() for character in range(begin, stop)}
    assert not [
        character for number, character in enumerate(context) if number not in covered and not character.isspace()
    ]


@given(scripts, st.data())
def test_an_answer_read_back_from_its_tokens_holds_it(context, data):
    begin = data.draw(st.integers(0, len(context) - 1))
    text = context[begin : data.draw(st.integers(begin + 1, min(len(context), begin + 12)))]
    inputs = Inputs(byte_level(), 200)
    [window] = make_windows(squad_of(context, ("who", (text, begin))), inputs, SETTINGS)
    ends = ends_of(window, (text, begin))
    if not text.strip():
        assert ends is None
        return
    assert ends is not None
    first, last = (window.offsets[end - window.first] for end in ends)
    assert text.strip() in context[first[0] : last[1]]
    output = np.full((len(window.ids), 2), -1.0)
    output[ends[0], 0] = output[ends[1], 1] = 5.0
    answers, nbest, odds = read_answers(squad_of(context, ("who", (text, begin))), [window], [output], 200)
    assert answers["0"] == context[first[0] : last[1]].strip()
    assert context[nbest["0"][0]["start"] :].startswith(answers["0"])
    assert odds["0"] == pytest.approx(-12)


@pytest.mark.parametrize("stride", [1, 8, 19])
def test_answers_at_borders_are_whole_in_a_window_or_counted(tmp_path, stride):
    words = [f"w{number}" for number in range(100)]
    context = " ".join(words)
    entries = [entry(f"q{n}", "which", context, " ".join(words[n : n + 3])) for n in range(0, 98, 5)]
    entries.append(entry("long", "which", context, " ".join(words[10:60])))
    squad = write_squad(tmp_path / "train.json", [(context, entries)])
    dev = write_squad(tmp_path / "dev.json", [("A dog.", [entry("d", "what", "A dog.", "dog")])])
    settings = dataclasses.replace(SETTINGS, stride_tokens=stride)
    problem = SquadProblem(squad, dev, Inputs(byte_level(), 40), settings)
    windows = make_windows(squad, Inputs(byte_level(), 40), settings)
    whole = {window.question for window in windows if ends_of(window, squad.questions[window.question].answers[0])}
    assert problem.facts["unreachable_answers"] == len(squad.questions) - len(whole) >= 1
    assert len(squad.questions) - 1 not in whole
    for window, labels in zip(windows, problem.train_labels, strict=True):
        ends = ends_of(window, squad.questions[window.question].answers[0])
        assert tuple(labels) == (ends or (0, 0))
    if stride == 1:
        assert problem.facts["unreachable_answers"] == 1


def test_a_stride_without_overlap_is_refused():
    context = "the cat saw the bird " * 40
    inputs = Inputs(byte_level(), 40)
    room = 40 - 4 - len(inputs.tokenizer.encode_batch(["who"])[0])
    make_windows(squad_of(context, ("who",)), inputs, dataclasses.replace(SETTINGS, stride_tokens=room - 1))
    with pytest.raises(Refusal, match=f"less than {room}"):
        make_windows(squad_of(context, ("who",)), inputs, dataclasses.replace(SETTINGS, stride_tokens=room))


def test_best_spans_agree_with_every_span():
    noise = np.random.default_rng(0)
    context = "one two three four five six"
    offsets = np.array([(n, n + 1) for n in range(20)])
    context = "abcdefghijklmnopqrst"
    for _ in range(20):
        output = noise.normal(size=(25, 2))
        window = Window(0, np.zeros(25, np.int32), 3, offsets, 0)
        answers, nbest, odds = read_answers(squad_of(context, ("q",)), [window, window], [output, output + 0.5], 5)
        spans = {(a, b): output[3 + a, 0] + output[3 + b, 1] + 1.0 for a in range(20) for b in range(a, min(a + 5, 20))}
        (a, b), score = max(spans.items(), key=lambda item: item[1])
        assert answers["0"] == context[a : b + 1]
        assert odds["0"] == pytest.approx(output[0].sum() - score)
        assert sum(item["probability"] for item in nbest["0"]) == pytest.approx(1)
        scores = [item["score"] for item in nbest["0"]]
        assert scores == sorted(scores, reverse=True)
        assert "" in [item["text"] for item in nbest["0"]]


def test_bad_files_are_refused(tmp_path):
    context = "The cat saw the bird."
    good = entry("a", "who", context, "cat")
    squad = write_squad(tmp_path / "x.json", [(context, [good, {**entry("b", "who", context, "cat"),
                        "answers": [{"text": "cat", "answer_start": 5}]}])])  # fmt: skip
    assert squad.refused == [("b", "answer 'cat' is not where the file says")]
    assert [question.id for question in squad.questions] == ["a"]
    with pytest.raises(Refusal, match=r"1 refused; the first, c: answer 'dog' is not where"):
        write_squad(tmp_path / "w.json", [(context, [{**entry("c", "who", context, "cat"),
                    "answers": [{"text": "dog", "answer_start": 4}]}])])  # fmt: skip
    with pytest.raises(Refusal, match="question id a twice"):
        write_squad(tmp_path / "y.json", [(context, [good, good])])
    (tmp_path / "z.json").write_text('{"data": [{"paragraphs": [{"context": "x"}]}]}')
    with pytest.raises(Refusal, match=r"data\[0\]\.paragraphs\[0\] has no field qas"):
        read_squad(tmp_path / "z.json")
    with pytest.raises(Refusal, match="no such file"):
        read_squad(tmp_path / "none.json")


@pytest.mark.parametrize(("whole", "found"), [
    ({"data": [{"paragraphs": [{"qas": []}]}]}, "data[0].paragraphs[0] has no field context"),
    ([], "the whole has a field that is of another kind"),
    ({"data": [{"paragraphs": []}, "article"]}, "data[1] has a field that is of another kind"),
    ({"data": [{"paragraphs": [{"context": "x", "qas": [{"id": 1, "question": "who", "answers": [
        {"text": "x", "answer_start": float("inf")}]}]}]}]}, "data[0].paragraphs[0].qas[0] has a number that is not"),
])  # fmt: skip
def test_another_layout_is_said_to_be_one(whole, found, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(Refusal, match=re.escape(f"found another layout: {found}")):
        read_squad(path)


def test_shared_questions_are_refused(tmp_path):
    one, two = "The cat saw the bird.", "The dog saw the cat."
    train = write_squad(tmp_path / "train.json", [(one, [entry("a", "who", one, "cat")])])
    same_id = write_squad(tmp_path / "1.json", [(two, [entry("a", "who", two, "dog")])])
    same_question = write_squad(tmp_path / "2.json", [(one, [entry("b", " who", one)])])
    others = [(two, [entry("b", "who", two)]), (one, [entry("c", "what", one, "bird")])]
    other = write_squad(tmp_path / "3.json", others)
    for dev in (same_id, same_question):
        with pytest.raises(Refusal, match="1 questions that are in"):
            refuse_shared(train, dev)
    refuse_shared(train, other)


def animals(folder, name, seed):
    noise = np.random.default_rng(seed)
    paragraphs = []
    for number in range(24):
        animal = ("cat", "dog", "bird")[noise.integers(3)]
        context = f"{name} {number} Paris " + "the " * int(noise.integers(1, 8)) + animal + " saw"
        asked = (entry(f"{name}{number}", "who saw", context, animal), entry(f"{name}{number}n", "when", context))
        paragraphs.append((context, list(asked)))
    return write_squad(folder / f"{name}.json", paragraphs)


def test_learns_to_answer_and_to_be_silent(tmp_path):
    model = tiny_model()
    settings = dataclasses.replace(SETTINGS, epochs=25, learning_rate=5e-3, batch_rows=8, stride_tokens=12)
    train, dev = animals(tmp_path, "train", 0), animals(tmp_path, "dev", 1)
    problem = SquadProblem(train, dev, model.inputs(settings), settings)
    training = Bench(model, problem, settings, torch.device("cpu")).train(settings)
    result = result_of(model, problem, settings, training, torch.device("cpu"))
    scores = result["scores"]["dev"]
    assert scores["exact"] > 80
    assert scores["best_exact"] >= scores["exact"]
    assert result["majority"]["dev"]["exact"] == 50
    assert not result["degenerate"]
    assert result["subset"]["train"] == "48 of 130,319"


@pytest.mark.parametrize(("most", "cut"), [(64, 0), (8, 24), (3, 48)])
def test_questions_that_are_cut_are_said_once_with_the_length_that_held(most, cut, tmp_path, capsys):
    asked = ("who saw the bird then", "who saw it") * 24  # with a letter before them 9 and 8 tokens
    for name, number in (("train", 48), ("dev", 2)):
        entries = [entry(f"{name}{place}", f"{name[0]} {text}", f"{name} the cat saw", "cat")
                   for place, text in enumerate(asked[:number])]  # fmt: skip
        write_squad(tmp_path / f"{name}.json", [(f"{name} the cat saw", entries)])
    write_run(tmp_path / "runs" / "x", replace(recipe("mlm_tiny"), TINY), byte_level())
    options = FinetuneOptions(
        str(tmp_path / "runs" / "x"), ("squad2",), str(tmp_path), train="train.json", dev="dev.json", epochs=1,
        batch_rows=16, sequence_tokens=48, stride_tokens=2, query_tokens=most, seeds=2,
    )  # fmt: skip
    finetune(options)
    assert [line for line in capsys.readouterr().err.splitlines() if "were cut" in line] == [
        f"warning: squad2 {split}: {number} of {of} questions are longer than {most} tokens and were cut"
        for split, number, of in (("train", cut, 48), ("dev", cut // 24, 2))
        if number
    ]
    results = (json.loads(path.read_text()) for path in (tmp_path / "runs" / "x" / "downstream").glob("squad2-*.json"))
    assert [result["data"]["train"]["cut"] for result in results] == [cut, cut]


def test_the_command_writes_predictions(tmp_path):
    animals(tmp_path, "train", 0)
    animals(tmp_path, "dev", 1)
    write_run(tmp_path / "runs" / "x", replace(recipe("mlm_tiny"), TINY), byte_level())
    options = FinetuneOptions(
        str(tmp_path / "runs" / "x"), ("squad2",), str(tmp_path), train="train.json", dev="dev.json", epochs=1,
        batch_rows=16, sequence_tokens=48, stride_tokens=8,
    )  # fmt: skip
    [row] = finetune(options)
    [files] = (tmp_path / "runs" / "x" / "downstream").glob("*.files")
    names = ("predictions", "nbest", "null_odds")
    predictions, nbest, odds = (json.loads((files / f"{name}.json").read_text()) for name in names)
    assert predictions.keys() == nbest.keys() == odds.keys()
    assert len(predictions) == 48
    assert row["metric"] == "f1"
    with pytest.raises(Refusal, match="share"):
        finetune(dataclasses.replace(options, dev="train.json"))
    with pytest.raises(Refusal, match="--null-threshold: found nan"):
        finetune(dataclasses.replace(options, null_threshold=float("nan")))
    [row] = finetune(dataclasses.replace(options, null_threshold=1e9))  # never the empty answer
    assert row["points"] == 2
    texts = [json.loads(path.read_text()) for path in files.parent.glob("*.files/predictions.json")]
    assert any("" not in answers.values() for answers in texts)
