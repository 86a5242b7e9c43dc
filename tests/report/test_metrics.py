"""Distances, bit counts and reports."""

import json

import ml_dtypes
import numpy as np
import pytest

from gdn_jax.report.metrics import distance, unequal, worst_head
from gdn_jax.report.record import Check, Report
from tests.support.tools import assert_refused


def single(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_distance_by_hand() -> None:
    d = distance(np.array([1.0, -3.0, 0.0]), np.array([1.0, -4.0, 2.0]))
    assert (d.max_abs_err, d.max_abs_ref, d.max_rel) == (2.0, 4.0, 0.5)
    assert d.rms_rel == pytest.approx((5 / 21) ** 0.5)


def test_distance_is_taken_in_float64() -> None:
    out, ref = single(1.0), np.array([1.0 + 2.0**-40])
    assert distance(out, ref).max_abs_err == 2.0**-40


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_infinitely_far(bad: float) -> None:
    """On either side, and on both: an infinity that agrees is no agreement."""
    good, spoilt = np.ones(3), np.array([1.0, bad, 1.0])
    for pair in ((spoilt, good), (good, spoilt), (spoilt, spoilt)):
        d = distance(*pair)
        assert (d.max_rel, d.rms_rel, d.max_abs_err) == (np.inf, np.inf, np.inf)


def test_a_reference_of_zeros() -> None:
    zero = np.zeros(2)
    assert (distance(zero, zero).max_rel, distance(zero, zero).rms_rel) == (0.0, 0.0)
    assert (distance(zero + 1e-30, zero).max_rel, distance(zero + 1, zero).rms_rel) == (np.inf,) * 2


def test_distance_refuses_other_shapes_and_nothing() -> None:
    for out, ref in ((np.ones(2), np.ones(3)), (np.ones((1, 2)), np.ones(2)), (np.ones(0),) * 2):
        call = lambda out=out, ref=ref: distance(out, ref)  # noqa: E731
        assert_refused(call, f"{out.shape}", f"{ref.shape}", error=ValueError)


def test_worst_head_is_normalised_by_itself() -> None:
    """A head a thousand times smaller than its neighbour is 10 % off: globally 1e-4."""
    ref = np.array([[1000.0, 1000.0], [1.0, 1.0]])
    out = ref + np.array([[1.0, 0.0], [0.0, 0.1]])
    head, value = worst_head(out, ref)
    assert (head, value) == (1, pytest.approx(0.1))
    assert distance(out, ref).max_rel == pytest.approx(1e-3)


def test_unequal_counts_bits() -> None:
    a = single(0.0, 1.0, np.nan, np.inf)
    assert unequal(a, a.copy()) == 0
    assert unequal(a, single(-0.0, 1.0, np.nan, np.inf)) == 1
    payload = a.copy().view(np.uint32)
    payload[2] ^= 1
    assert unequal(a, payload.view(np.float32)) == 1
    assert unequal(a, np.nextafter(a, single(2))) == 3


def test_unequal_takes_views_and_other_widths() -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert unequal(a.T, np.ascontiguousarray(a.T)) == 0
    assert unequal(a[:, ::2], a[:, 1::2]) == 6
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.int8):
        assert unequal(a.astype(dtype), (a + np.eye(3, 4)).astype(dtype)) == 3


def test_unequal_refuses_other_shapes_and_dtypes() -> None:
    one = np.ones(2, np.float32)
    assert_refused(lambda: unequal(one, np.ones(3, np.float32)), "(2,)", "(3,)", error=ValueError)
    assert_refused(lambda: unequal(one, np.ones(2)), "float32", "float64", error=ValueError)


def check(ok: bool, value: float = 1e-7) -> Check:
    return Check("f32.float64", ok, value, 3e-6, "max_rel", "detail", "shows", "shows not")


def test_a_report_holds_when_it_has_checks_and_all_hold() -> None:
    verdicts = {(): False, (True,): True, (True, False): False, (True, True): True}
    for oks, expected in verdicts.items():
        assert Report({}, {}, [check(ok) for ok in oks]).ok is expected


def test_the_json_of_a_report(tmp_path) -> None:
    path = tmp_path / "report.json"
    rows = [{"token": 0, "max_rel": float("nan"), "heads": (1.5, float("-inf"))}]
    report = Report(
        {"device": "µ"}, {"tokens": 5}, [check(True), check(False, np.inf)], {"t": rows}
    )
    path.write_text("old", encoding="utf-8")
    report.write_json(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert list(found) == ["ok", "environment", "settings", "checks", "t"]
    assert found["ok"] is False
    assert found["environment"] == {"device": "µ"}
    assert [c["value"] for c in found["checks"]] == [1e-7, "inf"]
    assert {"id", "ok", "value", "limit", "unit", "detail"} <= set(found["checks"][0])
    assert found["t"] == [{"token": 0, "max_rel": "nan", "heads": [1.5, "-inf"]}]
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_report_that_cannot_be_written_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "report.json"
    Report({}, {}, [check(True)]).write_json(path)
    before = path.read_text(encoding="utf-8")
    with pytest.raises(TypeError):
        Report({"x": object()}, {}, [check(True)]).write_json(path)
    assert path.read_text(encoding="utf-8") == before
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
