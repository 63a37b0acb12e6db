"""Pages in a real browser: nothing sticks out on a phone, the keyboard reaches every chart, and paper shows it all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from headless import CHROMIUM, chromium, dump
from PIL import Image

from samebits.report import write_report
from samebits.report.compare import write_comparison
from samebits.testing.runs import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
SIZES = {"phone": "--window-size=500,900", "desk": "--window-size=1280,900"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("pages")
    write_run(home / "strict", steps=6)
    write_run(home / "native", steps=6, case="P/P", flips={(1, 0), (4, 2), (4, 3)})
    both = write_comparison([home / "strict", home / "native"], home / "both.html")
    return {"one": write_report(home / "native"), "both": both}


@pytest.mark.parametrize("page", ["one", "both"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_sticks_out_of_the_window(pages: dict[str, Path], tmp_path: Path, page: str, size: str) -> None:
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert int(dump(pages[page], tmp_path, wide, SIZES[size])) <= 0


def test_the_keyboard_reaches_charts_and_reads_them(pages: dict[str, Path], tmp_path: Path) -> None:
    script = """(() => {
      const chart = document.querySelector("svg.chart"); chart.focus();
      const press = (key) => chart.dispatchEvent(new KeyboardEvent("keydown", {key}));
      const read = () => chart.parentElement.querySelector(".read").textContent;
      press("End"); press("ArrowLeft"); const at = read(); press("Escape");
      return [document.activeElement === chart, at, read()].join("|");
    })()"""
    focused, at, after = dump(pages["one"], tmp_path, script).split("|")
    assert focused == "true"
    assert at.startswith("step 5:")
    assert after == "at most 2"
    reach = "[...document.querySelectorAll('svg.chart, .scroll, summary')].every((e) => e.tabIndex === 0)"
    assert dump(pages["one"], tmp_path, reach) == "true"


def test_paper_opens_what_is_folded(pages: dict[str, Path], tmp_path: Path) -> None:
    script = """(() => {
      const count = () => document.querySelectorAll("details:not([open])").length;
      const before = count(); dispatchEvent(new Event("beforeprint")); const paper = count();
      dispatchEvent(new Event("afterprint")); return [before, paper, count()].join("|");
    })()"""
    before, paper, after = dump(pages["one"], tmp_path, script).split("|")
    assert int(before) > 3
    assert (paper, after) == ("0", before)
    chromium(pages["one"], tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def brightness(image: Path) -> float:
    return float(np.asarray(Image.open(image).convert("L"), dtype=np.float64).mean())


def test_light_and_dark(pages: dict[str, Path], tmp_path: Path) -> None:
    shots = {}
    for name, words in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
        chromium(pages["both"], tmp_path, f"--screenshot={tmp_path / name}.png", SIZES["desk"], *words)
        shots[name] = brightness(tmp_path / f"{name}.png")
    assert shots["light"] > 180
    assert shots["dark"] < 75
