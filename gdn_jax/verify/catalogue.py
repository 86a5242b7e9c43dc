"""Every check's unit, what passing it shows, and what it does not."""

from gdn_jax.verify.report import Check

_BITS = "unequal elements"

_CATALOGUE: dict[str, tuple[str, str, str]] = {
    "f32.oracle": (
        "max_rel",
        "the seven steps are those of the real transformers layer",
        "accuracy to the last bits: transformers itself is float32",
    ),
    "f32.float64": (
        "max_rel",
        "the layer's output is as exact as float32 sums allow",
        "that the float64 oracle has the right equations (f32.oracle shows that)",
    ),
    "f32.operators": (
        "max_rel",
        "no operator or token hides behind the others, and where an error would start",
        "anything about other inputs than these",
    ),
    "f32.heads": (
        "max_rel of a head",
        "no bad head hides behind the others of its operator",
        "accuracy: a head whose values cancel is far off by itself and matters little",
    ),
    "f32.readback": (
        _BITS,
        "reading every operator back changes no bit of the layer",
        "that what is read back is right (f32.operators shows that)",
    ),
    "f32.cross_layer": (
        _BITS,
        "the layer offsets of S and of the history",
        "that the weights of a real stack are loaded in the right places",
    ),
    "f32.reset_replay": (
        _BITS,
        "reset really zeroes, and a run repeats bit for bit",
        "that the state is laid out right",
    ),
    "f32.host_vs_device": (
        _BITS,
        "keeping the loop on the device changes no bit",
        "that it is faster",
    ),
    "f32.residency": (
        "steps taken or elements changed",
        "a layer that was not made resident is refused and the state is untouched",
        "that the resident weights are the right ones",
    ),
    "f32.drift512": (
        "max_rel",
        "rounding does not build up in the carried state",
        "runs of many thousand tokens",
    ),
}


def check(id_: str, value: float, limit: float, detail: str) -> Check:
    """The check of this id: it holds when ``value <= limit``, which NaN never does."""
    unit, shows, shows_not = _CATALOGUE[id_]
    return Check(id_, bool(value <= limit), value, limit, unit, detail, shows, shows_not)
