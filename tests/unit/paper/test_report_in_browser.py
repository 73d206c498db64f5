"""The page of a study in a real browser, at the width of a desk and of a telephone, light and dark."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sample_report import sample_study
from tests.needs import BROWSER, CHROMIUM, needs

pytestmark = needs(CHROMIUM)
WIDE, NARROW = 1280, 390
MEASURE = """
addEventListener("load", async () => {
  const settled = () => new Promise((done) => setTimeout(done, 100));
  const seen = {errors: [], tips: []}, note = document.getElementById("note"), root = document.documentElement;
  const box = (each) => { const at = each.getBoundingClientRect(); return [at.left, at.top, at.right, at.bottom]; };
  const visible = (each) => each.getClientRects().length > 0;
  const luminance = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255);
    const [r, g, b] = parts.map((each) => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  seen.width = root.clientWidth;
  seen.scrolls = Math.max(root.scrollWidth, document.body.scrollWidth);
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  await settled();
  seen.opened = root.scrollWidth;
  seen.outside = [...document.querySelectorAll("main *")]
    .filter((each) => visible(each) && !each.closest(".scroll, .unseen, svg"))
    .filter((each) => each.getBoundingClientRect().right > root.clientWidth + .5)
    .map((each) => each.outerHTML.slice(0, 90));
  seen.tables = [...document.querySelectorAll("table")].map((each) => visible(each) && each.offsetHeight > 20);
  seen.images = [...document.images].map((each) => each.naturalWidth);
  seen.ground = getComputedStyle(document.body).backgroundColor;
  const ground = luminance(seen.ground);
  seen.contrast = ["body", ".soft", "a", ".agrees", ".differs", ".open", "td", "th", ".caption"].map((name) => {
    const ink = luminance(getComputedStyle(document.querySelector(`main ${name}`) ?? document.body).color);
    return (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05);
  });
  seen.hidden = note.hidden;
  for (const table of document.querySelectorAll("table.values")) {
    const values = [...table.querySelectorAll("button.value")];
    const stops = values.filter((each) => each.tabIndex === 0).length;
    const last = values[values.length - 1];
    last.scrollIntoView({block: "end"});
    last.focus();
    await settled();
    const [left, top, right, bottom] = box(note), own = box(last);
    seen.tips.push({
      stops, lines: note.textContent.split("\\n").length,
      shown: visible(note), same: note.textContent === last.dataset.notes,
      inside: left >= 0 && top >= 0 && right <= root.clientWidth && bottom <= innerHeight,
      apart: bottom <= own[1] + 1 || top >= own[3] - 1,
    });
    last.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}));
    const before = values[values.length - 2];
    seen.tips.at(-1).moved = document.activeElement === before && before.tabIndex === 0;
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
    seen.tips.at(-1).closed = !visible(note);
    values[1].focus(); // as a click does
    values[1].click();
    const stopsAt = (value) => values.every((each) => each.tabIndex === (each === value ? 0 : -1));
    const clicked = stopsAt(values[1]);
    values[1].dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}));
    seen.tips.at(-1).single = clicked && stopsAt(values[0]);
    values[0].blur();
    values[0].dispatchEvent(new MouseEvent("mouseenter"));
    seen.tips.at(-1).hovered = visible(note) && note.textContent === values[0].dataset.notes;
  }
  parent.postMessage(JSON.stringify(seen), "*");
});
"""
WRAPPER = """<!DOCTYPE html><body style="margin:0"><pre id="seen"></pre>
<script>addEventListener("message", (event) => { document.getElementById("seen").textContent = event.data; });</script>
<iframe src="page.html" style="width:WIDTHpx;height:900px;border:0"></iframe>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sample_study(tmp_path_factory.mktemp("study")).page()


def browse(folder: Path, page: str, width: int, *flags: str) -> tuple[dict[str, Any], list[str]]:
    """What a script at the end of the page measures in a frame of that width, for windows of a browser cannot be as
    narrow as a telephone; and what the console says.
    """
    copy = page.replace("</body>", f"<script>{MEASURE}</script></body>")
    (folder / "page.html").write_text(copy, encoding="utf-8")
    (folder / "frame.html").write_text(WRAPPER.replace("WIDTH", str(width)), encoding="utf-8")
    assert BROWSER is not None
    result = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=8000",
            f"--window-size={width + 100},1000", *flags, "--dump-dom", (folder / "frame.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', result.stdout, re.DOTALL)
    assert found is not None, result.stdout[:500]
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(found[1]) or "{}"), console


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_everything_is_there_and_nothing_scrolls_sideways(width: int, page: str, tmp_path: Path) -> None:
    seen, console = browse(tmp_path, page, width)
    assert not console
    assert seen["width"] in (width, width - 15)  # without or with a scroll bar
    assert seen["scrolls"] <= seen["width"] and seen["opened"] <= seen["width"] and seen["outside"] == []
    assert len(seen["tables"]) == page.count("<table") > 10 and all(seen["tables"])
    assert len(seen["images"]) == 1 and seen["images"][0] > 100
    assert seen["hidden"]
    assert len(seen["tips"]) == 5
    for tip in seen["tips"]:
        assert tip.pop("lines") >= 3 and tip.pop("stops") == 1
        assert all(tip.values()), tip


@pytest.mark.parametrize(("flags", "dark"), [((), False), (("--blink-settings=preferredColorScheme=0",), True)])
def test_text_is_readable_in_either_scheme(flags: tuple[str, ...], dark: bool, page: str, tmp_path: Path) -> None:
    seen, console = browse(tmp_path, page, WIDE, *flags)
    red, green, blue = map(int, re.findall(r"\d+", seen["ground"]))
    assert not console and (red + green + blue < 200) == dark
    assert min(seen["contrast"]) >= 4.5


def test_faults_are_seen(page: str, tmp_path: Path) -> None:
    """The checks above can fail."""
    wide = page.replace("<h2 id=", '<p style="width:2000px;max-width:none">x</p><h2 id=', 1)
    seen, _ = browse(tmp_path, wide, NARROW)
    assert seen["scrolls"] > NARROW and seen["outside"]
    seen, console = browse(tmp_path, page.replace("</main>", "<script>undefined.x</script></main>"), WIDE)
    assert console and seen
    seen, console = browse(tmp_path, page.replace("</main>", '<img src="https://x.invalid/a.png"></main>'), WIDE)
    assert any("Content Security Policy" in line for line in console) and 0 in seen["images"]
