"""Tables of times from results that are made up: which rows, which ratios, which table."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from docs.generate.beside import loads, published, reference
from docs.generate.times import times
from tests.bench.test_report import TIMES, result


def page(folder: Path) -> str:
    return "\n".join(times(folder))


def test_times_are_the_newest_with_the_ratios_of_their_own_run(tmp_path: Path) -> None:
    result(TIMES).write_json(tmp_path / "bench-b.json")
    newer = result({("int4", "pallas", 1): 4.0}, "2026-12-01")
    newer.write_json(tmp_path / "bench-a.json")
    text = page(tmp_path)
    assert "of the same run: 4295 GB/s, with each call waited for 4000; the card has 4800." in text
    assert "| int4 | 4x8 | 1 | 4.00 ± 0.40 | 2500 | 58% | – |" in text
    assert "| int4 | 4x8 | 8 | 10.00 ± 1.00 | 1000 | 23% | 40% |" in text
    (tmp_path / "bench-a.json").unlink()
    assert "| int4 | 4x8 | 1 | 5.00 ± 0.50 | 2000 | 47% | 80% |" in page(tmp_path)
    result({("int4", "pallas", 1): 0.0}).write_json(tmp_path / "bench-a.json")
    with pytest.raises(AssertionError, match="not shown"):
        page(tmp_path)


def test_xla_stands_where_there_is_no_kernel_and_new_kernels_have_a_table(tmp_path: Path) -> None:
    result({("new", "xla", 1): 5.0, ("new", "xla", 2): 6.0}).write_json(tmp_path / "bench-a.json")
    text = page(tmp_path)
    assert "#### Others" in text
    assert "| new (xla) | 4x8 | 1 | 5.00 ± 0.50 | 2000 | 47% | – | 1.0e-07 |" in text
    assert "6.00" not in text


def test_models_and_published_times_have_tables_of_their_own(tmp_path: Path) -> None:
    report = result({("model_decode", "pallas", 32): 5000.0, ("chunk", "pallas", 1): 780.0})
    report.settings["tokens"] = "8192, 32768"
    step, rule = report.tables["bench"]
    step |= {"tokens_a_second": 6400.0}
    rule |= {"shape": "48x128x128_t8192"}
    prompt = step | {"id": "p", "kernel": "model_prefill", "shape": "d64_t8", "matrix": True}
    prompt |= {"us": 2e6, "us_low": 2e6, "us_high": 2e6, "tokens_a_second": 4096.0}
    report.tables["bench"].append(prompt | {"share_matrix": 0.5})
    slower = {"id": rule["id"], "to": "c", "us": 780.0, "us_to": 900.0}
    report.tables["ratios"] = [slower | {"backend": "jla", "ratio": 1.1538}]
    report.write_json(tmp_path / "bench-a.json")
    text = page(tmp_path)
    assert "| 48x128x128_t8192 | 780.00 ± 78.00 | 0 | – | 0% | – | 1.15 | 1.0e-07 |" in text
    assert "| 4x8 | 32 | 5.00 ± 0.50 | 6400.0 | 0% | 1.0e-07 |" in text
    assert "| d64_t8 | 32 | 2000.00 ± 0.00 | 4096.0 | 50% | 1.0e-07 |" in text
    beside = "\n".join(published(tmp_path))
    assert "| FlashInfer, published, not measured here | 8192 | 780 | 393 | 1.98 |" in beside
    assert "| FlashQLA, published, not measured here | 8192 | 780 | 410 | 1.90 |" in beside
    assert "| 32768 |" not in beside
    other = copy.deepcopy(report)
    other.environment["device"] = "NVIDIA GeForce RTX 5090"
    other.write_json(tmp_path / "bench-a.json")
    assert not published(tmp_path)


def test_a_load_has_a_table(tmp_path: Path) -> None:
    assert not loads(tmp_path)
    answer: dict[str, Any] = {"prompt_tokens": [1, 2, 3]}
    answer |= {"timings": {"prefill": 2.51, "decode": 9.0, "tokens_per_second": 7.02}}
    data = {"environment": result({}).environment, "model": "M", "weights": "q4", "load_s": 33.71}
    data |= {"sampling": {"context": 8, "max_new_tokens": 4}, "results": [answer]}
    data |= {"load_host_peak_bytes": 6.44e9, "device_peak_bytes": 1.993e10}
    (tmp_path / "generate-a.json").write_text(json.dumps(data))
    text = "\n".join(loads(tmp_path))
    assert "| M, q4, NVIDIA H200 | 3 of 8 | 33.7 | 6.4 | 19.93 | 2.5 | 7.0 |" in text
    assert "(results/generate-a.json): 4 new tokens, JAX " in text


def test_reference_stands_beside_the_times() -> None:
    text = "\n".join(reference())
    assert "| – | 964 | 54% |" in text
    assert "| 156 | 468 | 26% |" in text
