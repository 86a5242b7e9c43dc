"""Every check's unit, what passing it shows, and what it does not."""

from gdn_jax.report.record import Check

Shown = tuple[str, str, str]
"""The unit of a check's value, what passing it shows, and what it does not."""
_BITS = "unequal elements"

CATALOGUE: dict[str, Shown] = {
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
    "f32.repeat": (
        _BITS,
        "a step repeats bit for bit, however often",
        "that other launches, sizes or devices give these bits",
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
    "f16.convert": (
        "unequal patterns",
        "the device widens every float16 scale as the format says",
        "that the right scale is read (q4.kernel_vs_dequantized shows that)",
    ),
    "q4.kernel_vs_dequantized": (
        "max_rel",
        "the int4 path is right: packing, scales and products, decoded by the gguf package beside",
        "what quantising costs",
    ),
    "q4.magnitude_gate": (
        "max_rel",
        "nothing is mis-wired: such mistakes are off by O(1)",
        "that the accuracy is sufficient for anything",
    ),
    "q4.readback": (
        _BITS,
        "reading every operator back changes no bit of the int4 layer",
        "that what is read back is right",
    ),
    "q4.cross_layer": (
        _BITS,
        "two layers bound to one pool agree, and their states lie apart",
        "that a real stack's keys name the right matrices",
    ),
    "q4.reset_replay": (
        _BITS,
        "reset and replay repeat bit for bit in int4 too",
        "that the state is laid out right",
    ),
    "q4.repeat": (
        _BITS,
        "a step repeats bit for bit in int4 too",
        "that other launches, sizes or devices give these bits",
    ),
    "q4.host_vs_device": (
        _BITS,
        "keeping the loop on the device changes no bit",
        "that it is faster",
    ),
    "q4.residency": (
        "violations accepted",
        "each residency rule refuses, and nothing changes when it does",
        "that memory is given back (the tests count live buffers)",
    ),
    "state.isolation": (
        _BITS,
        "a sequence depends on nothing but its own slot, and nothing but that is written",
        "that the sequence itself is right (the other checks compare with serial decoding)",
    ),
    "state.recycle": (
        _BITS,
        "a slot that is handed out again or reset starts from zeros, whatever it held",
        "that an old number of a slot is noticed (generations are for that)",
    ),
    "state.fork_commit": (
        _BITS,
        "branches that draft and commit are what serial decoding of their tokens gives",
        "that one scheme is faster than the other",
    ),
    "state.ragged": (
        _BITS,
        "every row moves on by its own count, 0 and more than W included",
        "anything about which tokens to accept",
    ),
    "state.idle": (
        _BITS,
        "an idle row reads nothing, writes nothing and gives zeros; no other row notices it",
        "that an idle row costs no time",
    ),
    "state.one_token": (
        _BITS,
        "a draft of one token, committed, is a decode step",
        "that a step is right (f32.float64 shows that)",
    ),
    "state.rejected": (
        _BITS,
        "tokens that are not accepted leave no trace",
        "that they cost nothing",
    ),
    "state.export_import": (
        _BITS,
        "a sequence goes on elsewhere, or from a file, as if it had stayed",
        "that a damaged file is noticed (the tests cut and change files)",
    ),
    "state.prefix": (
        _BITS,
        "a prefix is read by many rows at once and is not changed",
        "that reading it costs no copy",
    ),
    "state.batch": (
        "max_rel",
        "the rows of a batch are what each gives by itself",
        "equal bits: other batch sizes may sum in another order",
    ),
    "state.stack": (
        _BITS,
        "the offsets of layers and slots in a whole stack",
        "offsets beyond 2³¹ elements, which need a larger pool",
    ),
    "prefill.float64": (
        "max_rel",
        "the layer over many tokens at once is as exact as float32 sums allow",
        "that the float64 oracle has the right equations (prefill.transformers shows that)",
    ),
    "prefill.transformers": (
        "max_rel",
        "a prefill is what the real transformers layer computes at once and token by token",
        "accuracy to the last bits: transformers itself is float32",
    ),
    "prefill.lengths": (
        "max_rel",
        "the chunked rule is right for any number of tokens, its final state included",
        "other heads or widths",
    ),
    "prefill.split": (
        "max_rel",
        "a pass goes on from any state, of prefill or of decode, and decode goes on from its own",
        "equal bits: other numbers of tokens sum in another order",
    ),
    "prefill.packed": (
        "max_rel, infinite for a leak",
        "packed sequences do not see each other or what lies behind; an empty one keeps its state",
        "packed sequences in a whole layer, which takes rows",
    ),
    "prefill.padding": (
        "max_rel, infinite for a leak",
        "padding on the right neither decays nor writes, whatever it holds, and gives zeros",
        "padding on the left, which there is no argument for",
    ),
    "prefill.chunk_size": (
        "max_rel",
        "the size of a chunk changes nothing but the order of sums",
        "which size is fastest",
    ),
    "prefill.adversarial": (
        "max_rel",
        "gates, keys and norms on which chunked forms have failed give their right values",
        "inputs in bfloat16",
    ),
    "prefill.bfloat16": (
        "max_rel",
        "operands in bfloat16 give what their float64 values give, up to roundings to bfloat16",
        "the accuracy of float32 (the other checks show that)",
    ),
    "prefill.drift8192": (
        "max_rel of a chunk",
        "rounding does not build up in the state that goes from chunk to chunk",
        "runs of many more tokens",
    ),
    "model.transformers": (
        "max_rel, infinite for another choice",
        "embedding, blocks of either kind, norms and head are those of a real transformers model",
        "the sizes of other checkpoints (--checkpoint compares one)",
    ),
    "model.greedy": (
        "unequal tokens",
        "generation is the model's own choice at every step, as transformers makes it",
        "that a near tie falls the same way in other widths",
    ),
    "model.split": (
        "max_rel",
        "a prefill goes on from any place, keys, states and positions included",
        "equal bits: other numbers of tokens sum in another order",
    ),
    "model.batch": (
        "max_rel",
        "ragged rows of a batch, and a step after them, are what each gives by itself",
        "equal bits: other batch sizes may sum in another order",
    ),
    "model.generate": (
        "unequal tokens",
        "several prompts at once give each its own tokens, and one seed the same ones again",
        "that the tokens are good ones",
    ),
    "model.q4": (
        "max_rel",
        "the int4 path of a whole model is right: layout, scales and products",
        "what quantising costs (gdn-jax perplexity shows that), or the kernels of a GPU, which "
        "the bundled sizes are too small for",
    ),
    "model.layers": (
        "max_rel of a part",
        "every layer of this checkpoint is that of transformers, and which departs first",
        "how errors add up from layer to layer (model.logits shows that)",
    ),
    "model.logits": (
        "max_rel",
        "nothing is lost between the layers of this checkpoint",
        "accuracy to the last bits: layers amplify what the ones before them left",
    ),
}


def check(id_: str, value: float, limit: float, detail: str) -> Check:
    """The check of this id: it holds when ``value <= limit``, which NaN never does."""
    unit, shows, shows_not = CATALOGUE[id_]
    return Check(id_, bool(value <= limit), value, limit, unit, detail, shows, shows_not)
