"""The report in a headless Chromium: everything is drawn, nothing is asked of a network, and it prints.

Skipped where no Chromium is on PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from latemask.report.page import ReportOptions, run_report
from reported import everything, write_curve

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr")  # fmt: skip
MEASURED = """
<script>
const boxes = selector => [...document.querySelectorAll(selector)].map(element => element.getBoundingClientRect());
const outside = box => box.width > 0 && (box.left < -1 || box.right > innerWidth + 1);
document.title = JSON.stringify({
  figures: boxes("figure svg").filter(box => box.width > 200 && box.height > 120).length,
  outside: boxes("h1, h2, p, figure, .wide").filter(outside).length,
  scrolls: document.documentElement.scrollWidth > innerWidth + 1,
  loaded: performance.getEntriesByType("resource").length,
  broken: [...document.querySelectorAll("td.number")].filter(cell => {
    const text = new Range();
    text.selectNodeContents(cell);
    return text.getClientRects().length > 1; }).length,
  missing: [...document.querySelectorAll("nav a")].filter(a => !document.querySelector(a.getAttribute("href"))).length,
  narrow: [...document.querySelectorAll("#runs .wide")].filter(box => box.scrollWidth > box.clientWidth + 1).length,
  clipped: [...document.querySelectorAll("figure svg text")].filter(text => {
    const box = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
    return box.left < svg.left - 2 || box.right > svg.right + 2 || box.bottom > svg.bottom + 2; }).length,
});
</script>
"""
"""Measures the page it is appended to; a test's, not the report's."""


def browse(profile: Path, page: Path, *flags: str) -> str:
    """Standard output of one visit."""
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Uncaught" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for number in range(50):
        write_curve(folder / "many" / f"run $x_{number} <i>", "mlm_tiny", 2 + number / 50, 60,
                    {"training.seed": number}, steps=20)  # fmt: skip
    whole = tuple(map(str, everything(folder / "runs")))
    for name in ("three_ml_random_kept_base", "decoder_causal_cross_base"):
        path = write_curve(folder / "long" / name, name, 2.1, 123456.0, steps=125_000) / "journal.jsonl"
        path.write_text(path.read_text().replace('"cpu", "world": 1', '"NVIDIA H100 80GB HBM3", "world": 8')
                        .replace('"tokens_per_second": 4000.0', '"tokens_per_second": 1234567.0'))  # fmt: skip
    places = {"whole": whole, "fifty": (str(folder / "many"),), "long": (str(folder / "long"),), "one": whole[:1]}
    for name, runs in places.items():
        run_report(ReportOptions(runs, folder / f"{name}.html"))
    return {name: folder / f"{name}.html" for name in places}


@pytest.mark.parametrize("width", [1200, 1000, 420])
@pytest.mark.parametrize("name", ["whole", "fifty", "long", "one"])
def test_everything_is_drawn_inside_the_window_and_nothing_is_loaded(pages, tmp_path, name, width):
    text = pages[name].read_text(encoding="utf-8")
    measured = tmp_path / "measured.html"
    measured.write_text(text.replace("</body>", MEASURED + "</body>"), encoding="utf-8")
    dom = browse(tmp_path / "profile", measured, "--dump-dom", f"--window-size={width},2000")
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert title is not None
    found = dict(re.findall(r'"(\w+)":(\w+)', title[1]))
    assert width < 1000 or found["narrow"] == "0", "the table of runs has to be scrolled"
    del found["narrow"]
    assert found == {"figures": str(text.count("<figure>")), "outside": "0", "scrolls": "false", "loaded": "0",
                     "broken": "0", "missing": "0", "clipped": "0"}  # fmt: skip
    assert dom.count("<i>") == 0


def test_it_is_not_empty_to_the_eye_and_prints(pages, tmp_path):
    shot, printed = tmp_path / "shot.png", tmp_path / "page.pdf"
    browse(tmp_path / "one", pages["whole"], f"--screenshot={shot}", "--window-size=1300,2000")
    browse(tmp_path / "two", pages["whole"], f"--print-to-pdf={printed}", "--no-pdf-header-footer")
    from matplotlib import image

    pixels = image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (2000, 1300)
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # the first two lines of the figures
        near = abs(pixels - [part / 255 for part in colour]).max(-1) < 0.02
        assert near.sum() > 300
    assert printed.read_bytes().startswith(b"%PDF")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", printed.read_bytes())) <= 20
