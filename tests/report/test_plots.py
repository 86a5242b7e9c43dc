"""The report's plots: the right numbers, nothing hidden, colours that can be told apart."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_jax.report import plots, svg
from tests.support.made_up import PAIRS, Q4_PAIRS, report_data


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return report_data(steps=40)


def test_scale_gives_zero_and_infinity_places_of_their_own() -> None:
    scale = svg.LogScale(["inf", 3e-7, 0.0, None, 2e-5])
    assert scale.place(3e-7) == 3e-7
    assert 0 < scale.place(0.0) < 1e-7
    assert scale.place("inf") == scale.place("nan") > 1e-4
    assert math.isnan(scale.place(None))


@pytest.mark.parametrize(("values", "labels"), [(("inf", "nan"), {"inf, nan"}), ((0.0,), {"0"})])
def test_tables_without_one_positive_number_are_drawn(
    values: tuple[Any, ...], labels: set[str]
) -> None:
    bad = report_data(tokens=2, steps=2)
    for plot in plots.PLOTS:
        for i, row in enumerate(bad[plot.table]):
            numbers = [key for key, value in row.items() if isinstance(value, float)]
            row |= dict.fromkeys(numbers, values[i % len(values)])
        panel = plot.draw(bad[plot.table]).axes[0]
        low, high = panel.get_ylim()
        for line in panel.lines:
            assert all(low < y < high for y in np.asarray(line.get_ydata()))
        ticks = {label.get_text() for label in panel.get_yticklabels()}
        assert any(label in ticks or f"≤ {1e-8:g}" in ticks for label in labels)


def test_plots_hold_the_numbers_of_their_rows(data: dict[str, Any]) -> None:
    rows = data["operators"]
    axes = plots.operator_errors(rows).axes
    assert [panel.get_title("left") or panel.get_title() for panel in axes] == list(PAIRS)
    for pair, panel in zip(PAIRS, axes, strict=True):
        for line, (key, token) in zip(
            panel.lines, (("max_rel", 0), ("rms_rel", 0), ("rms_rel", 4)), strict=True
        ):
            wanted = [r[key] for r in rows if (r["pair"], r["token"]) == (pair, token)]
            np.testing.assert_array_equal(line.get_ydata(), wanted)
            assert line.get_label() == f"{key}, token {token}"
    largest, rms = plots.token_errors(data["tokens"]).axes
    for key, panel in (("max_rel", largest), ("rms_rel", rms)):
        wanted = [r[key] for r in data["tokens"] if r["pair"] == PAIRS[1]]
        np.testing.assert_array_equal(panel.lines[1].get_ydata(), wanted)
    limits = [float(np.asarray(line.get_ydata())[0]) for line in largest.lines[3:]]
    assert limits == [1e-4, 3e-6]
    (panel,) = plots.kept_by_head(data["decay"]).axes
    kept = np.array([row["kept"] for row in data["decay"]]).reshape(40, 4)
    assert kept[-1].argmin() == 3
    np.testing.assert_array_equal(panel.lines[4].get_ydata(), np.median(kept, axis=1))
    np.testing.assert_array_equal(panel.lines[5].get_ydata(), kept[:, 0])
    np.testing.assert_array_equal(panel.lines[6].get_ydata(), kept[:, 3])
    assert panel.lines[6].get_label() == "lowest at the end: head 3"


def test_group_sizes_are_a_line_a_rule(data: dict[str, Any]) -> None:
    rows = data["q4_groups"]
    (panel,) = plots.group_errors(rows).axes
    labels = [label.get_text() for label in panel.get_xticklabels()]
    assert labels == ["16\n5 bits", "32\n4.5 bits", "64\n4.25 bits", "128\n4.125 bits"]
    for line, rule in zip(panel.lines, ("q4_0", "mse"), strict=True):
        wanted = [row["rms_rel"] for row in rows if row["rule"] == rule]
        np.testing.assert_array_equal(line.get_ydata(), wanted)
        np.testing.assert_array_equal(line.get_xdata(), range(4))
        assert line.get_label() == f"rule {rule}"
    assert panel.get_ylim()[0] == 0


def test_each_int4_table_alone_gives_its_plot(data: dict[str, Any]) -> None:
    ((operators, _),) = plots.render_plots({"q4_operators": data["q4_operators"]})
    rows = [r for r in data["q4_operators"] if (r["pair"], r["token"]) == (Q4_PAIRS[0], 0)]
    drawn = operators.draw(data["q4_operators"]).axes[0].lines[0].get_ydata()
    np.testing.assert_array_equal(drawn, [row["max_rel"] for row in rows])
    ((drift, _),) = plots.render_plots({"q4_drift": data["q4_drift"]})
    for line, key in zip(
        drift.draw(data["q4_drift"]).axes[0].lines, ("max_rel", "rms_rel", "S_rms_rel"), strict=True
    ):
        np.testing.assert_array_equal(line.get_ydata(), [row[key] for row in data["q4_drift"]])
    ((groups, _),) = plots.render_plots({"q4_groups": data["q4_groups"]})
    assert groups.draw is plots.group_errors


def test_kept_below_the_floor_is_drawn_at_the_bottom() -> None:
    rows = [{"head": 0, "token": t, "kept": x} for t, x in enumerate((0.5, 1e-6, 1e-30, 0.0))]
    (panel,) = plots.kept_by_head(rows).axes
    y = np.asarray(panel.lines[0].get_ydata())
    np.testing.assert_array_equal(y[:2], [0.5, 1e-6])
    assert y[2] == y[3] < 1e-6
    assert panel.get_ylim()[0] < y[3]
    rows = [{"head": h, "token": 0, "kept": x} for h, x in enumerate((1e-20, 1e-30, 1e-10))]
    (panel,) = plots.kept_by_head(rows).axes
    labels = [str(line.get_label()) for line in panel.lines[-2:]]
    assert labels == ["highest at the end: head 2", "lowest at the end: head 1"]
    assert "≤ 1e-08" in [label.get_text() for label in panel.get_yticklabels()]


def luminance(color: str) -> float:
    digits = color.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * d for d in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_contrast_in_light_and_dark() -> None:
    page = Path(svg.__file__).with_name("report.html").read_text("utf-8")
    themes = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+)", theme)) for theme in themes)
    assert luminance(light["paper"]) > 0.9
    assert luminance(dark["paper"]) < 0.02
    for theme in (light, dark):
        for name in ("ink", "soft", "pass", "fail"):
            assert contrast(theme[name], theme["paper"]) > 4.5
        for verdict in ("pass", "fail"):
            assert contrast(theme[verdict], theme[f"{verdict}-bg"]) > 4.5
            for name in ("ink", "soft"):
                assert contrast(theme[name], theme[f"{verdict}-bg"]) > 4.5
        for color, _, _ in svg.STYLES:
            assert contrast(color, theme["paper"]) > 3
    assert len({(marker, str(dash)) for _, marker, dash in svg.STYLES}) == len(svg.STYLES)
