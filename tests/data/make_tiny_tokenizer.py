"""Makes the tokenizer of ``tiny_qwen35``: byte-level BPE of 128 tokens, and a chat template.

    python tests/data/make_tiny_tokenizer.py gdn_jax/data/tiny_qwen35

The checkpoint has 128 tokens, too few for every byte: printable ASCII, the end of a line and the
bytes of a few letters beyond; any other byte is ``?``. Its weights are random, and so is its text.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

MERGES = (
    *("Ġ t", "h e", "i n", "e r", "Ġ a", "o n", "r e", "Ġt he", "Ġ s", "a t", "e n", "o r"),
    *("Ġ o", "Ġ c", "e s", "Ã ¤", "Ã ©", "Ġ w", "Ã ¼"),
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def main(folder: Path) -> None:
    """Write tokenizer.json, chat_template.jinja and generation_config.json."""
    alphabet = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    alphabet += ["Ã", "Â", "¤", "©", "¶", "¼", "°", "§", "ł", "´"]
    merges = [(a, b) for a, b in map(str.split, MERGES)]
    names = [*alphabet, *(a + b for a, b in merges)]
    bpe = BPE({name: i for i, name in enumerate(names)}, merges, unk_token="?")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    assert tokenizer.get_vocab_size() == 128, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    ends = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    settings = json.dumps({"eos_token_id": ends}) + "\n"
    (folder / "generation_config.json").write_text(settings, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
