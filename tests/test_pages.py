"""The pages of the evidence: each folder has one, which shows every run in it, and is what its JSON says."""

import shutil
from pathlib import Path

import pytest

from benchmark_files import load
from latemask.errors import Refusal

pages = load("pages")
EVIDENCE = Path(__file__).parents[1] / "results" / "evidence"


def test_every_folder_has_a_page_with_every_run_in_it():
    assert {folder.name for folder in EVIDENCE.iterdir()} == set(pages.PAGES)
    for name, page in pages.PAGES.items():
        shown = {(EVIDENCE / name / place).resolve() for place in page.places}
        assert shown >= {journal.parent for journal in (EVIDENCE / name).glob("*/journal.jsonl")}
        assert all((place / "journal.jsonl").is_file() for place in shown)


@pytest.mark.parametrize("name", ["repeated", "three-ml-base", "three-ml-seconds"])
def test_a_page_is_what_its_json_says(name, tmp_path):
    shutil.copy(EVIDENCE.parent / "joins_small.json", tmp_path)
    tmp_path = tmp_path / "evidence"
    for folder in {name, *(place.split("/")[1] for place in pages.PAGES[name].places if place.startswith("../"))}:
        shutil.copytree(EVIDENCE / folder, tmp_path / folder)
    (tmp_path / name / "report.front-of-before.svg").write_text("")
    pages.write(pages.Options(tmp_path, (name,)))
    made = {path.name for path in (tmp_path / name).glob("report.*")}
    assert made == {path.name for path in (EVIDENCE / name).glob("report.*")}
    assert (tmp_path / name / "report.md").read_text() == (EVIDENCE / name / "report.md").read_text()


def test_what_is_not_there_is_refused_before_anything_is_made(tmp_path):
    for asked, wanted in (((tmp_path / "nowhere", ()), "nowhere"), ((EVIDENCE, ("typo",)), "typo")):
        with pytest.raises(Refusal, match=wanted):
            pages.Options(*asked)
    shutil.copytree(EVIDENCE / "untuned", tmp_path / "untuned")
    before = (tmp_path / "untuned" / "report.md").read_text()
    with (tmp_path / "untuned" / "mlm,seed=1" / "journal.jsonl").open("a") as file:
        file.write("xx\n")
    with pytest.raises(Refusal, match="xx"):
        pages.write(pages.Options(tmp_path, ("untuned",)))
    assert (tmp_path / "untuned" / "report.md").read_text() == before
    shutil.rmtree(tmp_path / "untuned" / "mlm,seed=1")
    with pytest.raises(Refusal, match="untuned/mlm,seed=1"):
        pages.Options(tmp_path, ("untuned",))
    for folder in ("masks", "three-ml", "three-ml-seconds"):
        shutil.copytree(EVIDENCE / folder, tmp_path / folder)
    with pytest.raises(Refusal, match=r"joins_small\.json: found no such file"):
        pages.Options(tmp_path, ("three-ml-seconds",))
