"""``verify --suite model``: green as it is, and each check red for a mistake it guards."""

import ast
import contextlib
import dataclasses
import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gdn_jax.cli.main import main
from gdn_jax.models.model import Model, load
from gdn_jax.models.params import AttentionParams
from gdn_jax.verify.model import checks, live
from gdn_jax.verify.model import run as model_run
from gdn_jax.verify.model.checks import BUNDLED, CHECKS, PROMPT
from gdn_jax.verify.model.run import LIMIT, ModelRun
from gdn_jax.verify.oracles import transformers_model

IDS = {f"model.{name}" for name in (*CHECKS, "layers")}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--suite", "model", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.slow
def test_it_is_green_and_reported_and_mistakes_turn_it_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, so that programs are compiled once."""
    file, page = tmp_path / "r.json", tmp_path / "r.html"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run("--json", str(file), "--html", str(page)) == 0
    result = json.loads(file.read_text())
    assert result["settings"] == {"suite": "model", "model": "tiny_qwen35", "backend": "xla"}
    assert len(IDS) == 7
    assert {check["id"] for check in result["checks"]} == IDS
    for check in result["checks"]:
        assert 0 <= check["value"] <= check["limit"] <= LIMIT
        assert check["id"] in page.read_text()
        assert check["id"] in printed.getvalue()
    parts = [row["part"] for row in result["model"]]
    assert parts == ["embedding", "layer 0", "layer 1", "layer 2", "layer 3", "head"]
    assert "layer 3" in printed.getvalue()

    this = checks.bundled(None)
    for name, plant in MISTAKES:
        with monkeypatch.context() as patch:
            planted = plant(this, patch)
            value, _ = CHECKS[name](planted)
        assert value > (0 if name in ("greedy", "generate") else LIMIT), (name, plant)
    assert first_departed(changed(this, block=2)) == "layer 2 (linear_attention) departs first"
    assert first_departed(changed(this, block=1)) == "layer 1 (full_attention) departs first"


def first_departed(this: ModelRun) -> str:
    value, limit, detail = model_run.verdict(this.layers(this.expected["ids"][:PROMPT]))
    assert value > limit
    assert detail.endswith("1 of 6 parts do")
    return detail.split(",")[0]


def changed(this: ModelRun, block: int) -> ModelRun:
    """One weight of one block's output projection is off by a hundredth."""
    params = this.model.params
    blocks = list(params.blocks)
    mixer = blocks[block].mixer
    name = "o_proj" if isinstance(mixer, AttentionParams) else "out_proj"
    w: Any = getattr(mixer, name)
    mixer = dataclasses.replace(mixer, **{name: w.at[3, 5].add(0.01)})
    blocks[block] = dataclasses.replace(blocks[block], mixer=mixer)
    return this.replace(dataclasses.replace(params, blocks=tuple(blocks)))


def wrong_weight(this: ModelRun, _: pytest.MonkeyPatch) -> ModelRun:
    return changed(this, block=3)


def other_head(this: ModelRun, _: pytest.MonkeyPatch) -> ModelRun:
    """The head's rows one further on: every choice is the token before."""
    params = this.model.params
    head: Any = params.head
    return this.replace(dataclasses.replace(params, head=jnp.roll(head, 1, axis=0)))


def positions_lost(this: ModelRun, patch: pytest.MonkeyPatch) -> ModelRun:
    """Every piece begins at position 0 again."""

    def planted(params: Any, cache: Any, *rest: Any) -> Any:
        cache = dataclasses.replace(cache, length=jnp.zeros_like(cache.length))
        return HONEST(params, cache, *rest)

    patch.setattr(model_run, "forward_by_block", planted)
    return this


def states_lost(this: ModelRun, patch: pytest.MonkeyPatch) -> ModelRun:
    """Linear layers start from zeros with every piece."""

    def planted(params: Any, cache: Any, *rest: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, cache.states)
        return HONEST(params, dataclasses.replace(cache, states=zeros), *rest)

    patch.setattr(model_run, "forward_by_block", planted)
    return this


def padding_counted(this: ModelRun, patch: pytest.MonkeyPatch) -> ModelRun:
    """Every row is as long as the longest."""

    def planted(params: Any, cache: Any, tokens: Any, lengths: Any, call: Any) -> Any:
        if lengths is not None:
            lengths = jnp.full_like(lengths, jnp.max(lengths))
        return HONEST(params, cache, tokens, lengths, call)

    patch.setattr(model_run, "forward_by_block", planted)
    return this


def rows_exchanged(this: ModelRun, patch: pytest.MonkeyPatch) -> ModelRun:
    honest = Model.generate

    def planted(self: Model, prompts: Any, **options: Any) -> Any:
        return honest(self, prompts, **options)[::-1]

    patch.setattr(Model, "generate", planted)
    return this


def scales_of_the_next_group(this: ModelRun, patch: pytest.MonkeyPatch) -> ModelRun:
    honest = checks.dequantize
    patch.setattr(checks, "dequantize", lambda w: jnp.roll(honest(w), 1, axis=1))
    return this


def no_int4(this: ModelRun, patch: pytest.MonkeyPatch) -> ModelRun:
    """A loader that quietly keeps everything wide is not an int4 path that is right."""
    patch.setattr(checks, "load", lambda path, weights, backend: this.model)
    return this


HONEST = model_run.forward_by_block
Plant = Callable[[ModelRun, pytest.MonkeyPatch], ModelRun]
MISTAKES: list[tuple[str, Plant]] = [
    ("transformers", wrong_weight),
    ("transformers", other_head),
    ("transformers", positions_lost),
    ("greedy", other_head),
    ("split", positions_lost),
    ("split", states_lost),
    ("batch", padding_counted),
    ("generate", rows_exchanged),
    ("q4", scales_of_the_next_group),
    ("q4", no_int4),
]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that keeps the request and answers what transformers made beforehand."""
    with np.load(BUNDLED / "expected.npz") as file:
        ids, answer = file["ids"][:PROMPT], {n: file[n] for n in ("hidden", "logits")}
    answer["logits"] = answer["logits"][:PROMPT]
    monkeypatch.setattr(live, "drawn", lambda vocab: ids)
    kept, ready, made = tmp_path / "kept", tmp_path / "ready", tmp_path / "python"
    save_file(answer, ready, {"transformers": "5.17.0", "torch": "2.13.0"})
    copies = [shlex.quote(str(path)) for path in (kept, ready)]
    made.write_text(f'#!/bin/sh\ncp "$2" {copies[0]} && cp {copies[1]} "$3"\n')
    made.chmod(0o755)
    return made


def test_a_checkpoint_against_a_live_transformers(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--checkpoint", str(BUNDLED), "--oracle-python", str(python)]
    file = tmp_path / "r.json"
    arguments += ["--json", str(file)]
    assert run(*arguments) == 0
    result = json.loads(file.read_text())
    assert [check["id"] for check in result["checks"]] == ["model.layers", "model.logits"]
    assert result["settings"]["transformers"] == "torch 2.13.0, transformers 5.17.0"
    assert load_file(tmp_path / "kept")["ids"].shape == (PROMPT,)

    def wrong(*args: Any, **options: Any) -> Model:
        return changed(ModelRun(load(*args, **options), {}), block=2).model

    monkeypatch.setattr(live, "load", wrong)
    assert run(*arguments) == 1
    failed = json.loads(file.read_text())
    assert failed["checks"][0]["detail"].startswith("layer 2 (linear_attention) departs first")
    assert [row["part"] for row in failed["model"] if not row["ok"]] == ["layer 2"]

    answer = load_file(tmp_path / "ready")
    save_file({"logits": answer["logits"]}, tmp_path / "ready", {"torch": "2"})
    assert run(*arguments) == 2


def test_the_script_stands_alone() -> None:
    tree = ast.parse(Path(transformers_model.__file__).read_text(), feature_version=(3, 11))
    imported = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == {"numpy", "safetensors"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tier", "q4"], "no use for --tier"),
        (["--preset", "tiny"], "no use for --preset"),
        (["--layer", "3"], "no use for --layer"),
        (["--oracle-python", "x"], "no use for --oracle-python without --checkpoint"),
        (["--backend", "cuda"], "no backend 'cuda'"),
        (["--checkpoint", str(BUNDLED), "--oracle-python", "/no/python"], "/no/python"),
        (["--checkpoint", "/nowhere", "--oracle-python", sys.executable], "/nowhere"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("gdn-jax: ")]
    assert len(lines) == 1
    assert said in lines[0]
