"""README's five numbers, each from the record that its line links to."""

from docs.generate.markdown import table
from docs.generate.records import Record, bench_row, check_value, record

START, END = "<!-- numbers -->\n", "<!-- /numbers -->"


def five_numbers() -> str:
    """What was measured, its value, on what, on which day."""
    layers, model = record("bench-h200-layers.json"), record("bench-h200-model.json")
    checks = record("verify-h200-pallas.json")
    step = bench_row(layers, "bench.layer_q4_pallas.d5120_b1")
    decode = bench_row(model, "bench.model_decode_pallas.l64_v248320_p100_b1")
    prompt = bench_row(model, "bench.model_prefill_pallas.l64_v248320_t8192_b1")
    int4 = check_value(checks, "q4.kernel_vs_dequantized")
    oracle = check_value(checks, "f32.oracle")
    rows = [
        _row("one token of one int4 layer, B = 1", f"{step['us']:.1f} µs", layers),
        _row("decode, 27B in int4, B = 1", f"{decode['tokens_a_second']:.0f} tokens/s", model),
        _row("prompt of 8192, 27B in int4", f"{prompt['tokens_a_second']:.0f} tokens/s", model),
        _row("int4 layer to its weights dequantised, float64", f"{int4:.1e} max_rel", checks),
        _row("float32 layer to `transformers`, worst token", f"{oracle:.1e} max_rel", checks),
    ]
    return "\n".join(table(["measured at the 27B shape", "value", "device", "date"], rows))


def renewed(readme: str) -> str:
    """README with the numbers between their markers replaced."""
    head, rest = readme.split(START)
    return head + START + five_numbers() + END + rest.split(END)[1]


def _row(what: str, value: str, found: Record) -> list[str]:
    day = f"[{found.date}](docs/results/{found.file.name})"
    return [what, value, found.device, day]
