"""Colours of the pages and charts: text can be read on whatever it stands (WCAG 2.1, level AA)."""

from __future__ import annotations

import re

import pytest

from lt2_dashboards.export import STATIC

TEXT = ("text", "soft", "faint", "accent", "good", "live", "warn", "bad")
PLACES = ("panel", "back", "hover", "mark")


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours such as #fff or #0f1217, 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


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
