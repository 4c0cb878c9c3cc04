"""Colours of the pages and charts: text can be read where it stands (WCAG 2.1, level AA), lines are told apart."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from lt2_dashboards.export import STATIC

TEXT = ("text", "soft", "faint", "accent", "good", "live", "warn", "bad")
PLACES = ("panel", "back", "hover", "mark")


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours such as #fff or #0f1217, 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


# From linear RGB to what eyes without one kind of cone see (Machado et al. 2009), and to XYZ.
VISIONS = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def _linear(colour: str) -> list[float]:
    digits = colour.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), _linear(colour)))


def lab(colour: str, vision: str) -> np.ndarray:
    """A colour's CIELAB coordinates as seen with `vision`."""
    seen = np.clip(np.array(VISIONS[vision]) @ _linear(colour), 0, 1)
    x, y, z = np.cbrt(XYZ @ seen / XYZ.sum(axis=1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_contrast_is_that_of_the_standard():
    assert contrast("#fff", "#000") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("selector", [":root", '[data-theme="dark"]'])
def test_text_of_pages_can_be_read(selector):
    css = (STATIC / "style.css").read_text()
    block = css[css.index(f"\n{selector} {{") :].partition("}")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", block))
    poor = {
        (text, place): round(contrast(colours[text], colours[place]), 2)
        for text in TEXT
        for place in PLACES
        if contrast(colours[text], colours[place]) < 4.5
    }
    assert poor == {}


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_charts_can_be_read(theme):
    script = (STATIC / "theme.js").read_text()
    block = script.partition(f"export const {theme} = {{")[2].partition("\n};")[0]
    colours = dict(re.findall(r'(\w+): "(#[0-9a-f]{6})"', block))
    palette = re.findall(r"#[0-9a-f]{6}", block.partition("palette: [")[2])
    assert len(palette) == 10
    assert min(contrast(colours[text], colours["panel"]) for text in ("text", "faint")) >= 4.5
    assert min(contrast(line, colours["panel"]) for line in (*palette, colours["paper"])) >= 3
    for vision in VISIONS:
        seen = [lab(line, vision) for line in (*palette[:8], colours["paper"])]
        assert min(float(np.linalg.norm(one - other)) for one, other in combinations(seen, 2)) > 14, vision
