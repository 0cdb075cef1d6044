"""Pictures of the dashboard: drawn from recorded answers to what the dashboard asks now, and nothing is left out."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from kvdev import recording as recordings
from kvdev.dashboard_picture import FOLDER, RECORDED, picture_texts
from kvdev.paths import ROOT
from kvdev.recording import Curve, Recording, dashboard_panels, read_recording, record, write_recording
from kvdev.scales import scale_for

KEPT = read_recording(RECORDED)
PANELS = [panel for panel in dashboard_panels() if panel["type"] != "row"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pictures, as the command draws them."""
    folder = tmp_path_factory.mktemp("pictures")
    command: list[str | Path] = [sys.executable, ROOT / "tools" / "dev.py", "dashboard", "--picture", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return {file.name: file.read_text() for file in folder.iterdir()}


def words_of(picture: str) -> str:
    return " ".join(unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture))


def test_the_pictures_are_those_that_the_command_draws(drawn: dict[str, str]) -> None:
    kept = {file.name: file.read_text() for file in FOLDER.iterdir()}
    assert kept == drawn, "run `python3 tools/dev.py dashboard --picture`, look at them and commit them"


def test_every_expression_of_the_dashboard_was_asked_of_a_prometheus() -> None:
    asked = {target["expr"] for panel in PANELS for target in panel["targets"]}
    assert KEPT.answers.keys() == asked, "run `python3 tools/dev.py dashboard --record`"
    answered = {expression for expression, curves in KEPT.answers.items() if curves}
    assert len(answered) > 0.9 * len(asked)


def test_every_panel_is_drawn_under_its_title(drawn: dict[str, str]) -> None:
    words = " ".join(map(words_of, drawn.values()))
    assert [panel["title"] for panel in PANELS if panel["title"] not in words] == []


def test_a_picture_loads_nothing_and_says_what_it_is(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        title = ET.fromstring(text).findtext("{http://www.w3.org/2000/svg}title")
        assert str(title).startswith("Dashboard: "), name
        assert "<image" not in text
        assert "@font-face" not in text
        assert len(text) < 200_000, name


def test_the_page_shows_each_picture_and_its_phases() -> None:
    page = (ROOT / "docs" / "operate" / "dashboards.md").read_text()
    assert set(re.findall(r"!\[[^\]]+\]\(dashboard/([\w-]+\.svg)\)", page)) == {file.name for file in FOLDER.iterdir()}
    assert len(KEPT.phases) == len(re.findall(r"^\| [A-H] \|", page, re.MULTILINE))


def answering(panel_title: str, *curves: Curve) -> Recording:
    """A recording in which one panel has these curves and all others have none."""
    expressions = {target["expr"]: panel["title"] for panel in PANELS for target in panel["targets"]}
    answers = {text: curves if title == panel_title else () for text, title in expressions.items()}
    return replace(KEPT, answers=answers)


def drawing(title: str, recording: Recording) -> str:
    (picture,) = picture_texts(recording, title).values()
    return picture


@pytest.mark.parametrize(("value", "colour"), [(0.0, "#2f7d43"), (3.0, "#c4262e")])
def test_a_number_is_red_from_its_threshold_on(value: float, colour: str) -> None:
    picture = drawing("At a glance", answering("Failed reads", Curve({}, (value,))))
    assert words_of(picture).count(f" {value:.0f} ") >= 1
    assert picture.count(colour) == (1 if value else 6)


def test_a_panel_says_that_it_has_no_data_and_how_many_curves_stay_at_0() -> None:
    empty = Curve({"instance": "d-2"}, (None, None))
    reads = answering("Reads", Curve({"instance": "d-0"}, (None, 0.0)), Curve({"instance": "d-1"}, (0.0, 0.0)), empty)
    words = words_of(drawing("Hand-overs", reads))
    assert "2 at 0: d-0, d-1" in words
    assert words.count("No data") == 9  # the row has ten panels
    nothing = words_of(drawing("Hand-overs", answering("Reads", empty)))
    assert nothing.count("No data") == 10


def test_a_curve_is_named_by_its_labels_and_has_its_mean_and_highest_value() -> None:
    curve = Curve({"instance": "decode-0", "code": "fence-mismatch"}, (None, 0.5, 1.5))
    words = words_of(drawing("Hand-overs", answering("Failed reads, by code", curve)))
    assert "decode-0 fence-mismatch" in words
    assert "mean 1 /s, max 1.5 /s" in words


@pytest.mark.parametrize(
    ("unit", "highest", "value", "shown"),
    [
        ("s", 0.0205, 0.01, "10 ms"),
        ("s", 2.0, 0.01, "0.01 s"),
        ("s", 4e-7, 2e-7, "0.2 µs"),
        ("bytes", 3 * 2**20, 3145728, "3 MiB"),
        ("bytes", 0, 0, "0 B"),
        ("Bps", 2e6, 1.5e6, "1.5 MB/s"),
        ("cps", 3, 0.25, "0.25 /s"),
        ("cps", 2670, 1290.4, "1290 /s"),
        ("short", 12, 7, "7"),
    ],
)
def test_values_are_shown_in_the_unit_that_suits_the_highest(
    unit: str, highest: float, value: float, shown: str
) -> None:
    assert scale_for(unit, highest).shown(value) == shown


def test_samples_fall_into_their_steps_and_a_quantile_of_nothing_is_no_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, float, float, float]] = []

    def query_range(_url: str, expression: str, begin_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        asked.append((expression, begin_s, end_s, step_s))
        return [{"metric": {"instance": "d-0"}, "values": [[end_s, "7"], [begin_s, "NaN"]]}]

    monkeypatch.setattr(recordings, "query_range", query_range)
    made = record("http://127.0.0.1:9", 1000.0, 150.0, about="nothing real")
    assert made.step_s == 2.0
    kinds = {(begin, end, step) for _, begin, end, step in asked}
    assert kinds == {(1000.0, 1150.0, 2.0), (1150.0, 1150.0, 2.0)}
    assert not any("$" in expression for expression, *_ in asked)
    curves = [curve for found in made.answers.values() for curve in found]
    assert {len(curve.values) for curve in curves} == {1, 76}
    assert {curve.values[0] for curve in curves if len(curve.values) == 76} == {None}
    assert {curve.last for curve in curves if len(curve.values) == 76} == {7.0}
    write_recording(made, tmp_path / "made.json")
    assert read_recording(tmp_path / "made.json") == made
