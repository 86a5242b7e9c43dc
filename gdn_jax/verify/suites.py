"""The suites of ``gdn-jax verify``: each is one entry of a table, and what runs an entry."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gdn_jax._core.backend import select_backend
from gdn_jax.config import GDNConfig
from gdn_jax.report.progress import Stage, stages
from gdn_jax.report.record import Report
from gdn_jax.verify.catalogue import CATALOGUE, Shown
from gdn_jax.verify.layer import float32, int4
from gdn_jax.verify.model import checks as bundled
from gdn_jax.verify.model import live
from gdn_jax.verify.prefill import checks as prefill
from gdn_jax.verify.state import sequences
from gdn_jax.verify.subject import Subject, from_checkpoint, from_preset

TIERS = ("f32", "q4")
"""Weights of a layer; parts of a suite that are named otherwise run whatever the tier."""


class OnLayer(Protocol):
    """Runs checks on one layer and adds them to the report."""

    def __call__(
        self, subject: Subject, report: Report, *, layers: int, backend: str | None, stage: Stage
    ) -> None: ...


class Part(NamedTuple):
    """Checks that run together on one layer."""

    run: OnLayer
    stages: int
    takes: Callable[[GDNConfig], None] | None = None
    """Raises where these checks cannot have a layer of such sizes."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """What ``--suite`` names.

    Attributes:
        what: a few words, for ``--help``.
        checks: how the ids of its checks begin.
        parts: what runs on a layer, by tier or another name, in order.
        model: whether checks of a whole model follow.
        no_use: options of the command that change nothing here, and are refused.
        oracle: ``--oracle`` where it is not given; None takes the shipped file if there is one.
        tokens: how many it takes, where that is no option.
        op: the operator whose backend the report names.
    """

    what: str
    checks: tuple[str, ...]
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    model: bool = False
    no_use: tuple[str, ...] = ()
    oracle: str | None = "shipped"
    tokens: int | None = None
    op: str = "decode"

    @property
    def entries(self) -> dict[str, Shown]:
        """Its checks in the catalogue."""
        return {id_: said for id_, said in CATALOGUE.items() if id_.startswith(self.checks)}

    def parts_of(self, tier: str) -> list[Part]:
        """What runs with ``--tier``: f32, q4 or all."""
        left_out = () if tier == "all" else set(TIERS) - {tier}
        return [part for name, part in self.parts.items() if name not in left_out]


ONE = {
    "layer": Suite(
        "one layer operator by operator",
        ("f32.", "q4.", "f16."),
        {
            "f32": Part(float32.run, float32.STAGES),
            "q4": Part(int4.run, int4.STAGES, int4.check_widths),
        },
    ),
    "state": Suite(
        "many sequences in the slots of a pool",
        ("state.",),
        {"state": Part(sequences.run, sequences.STAGES)},
        no_use=("tier", "tokens", "oracle", "oracle_python"),
        oracle="none",
    ),
    "prefill": Suite(
        "many tokens at once",
        ("prefill.",),
        {"prefill": Part(prefill.run, prefill.STAGES)},
        no_use=("tier", "tokens"),
        oracle=None,
        tokens=prefill.TOKENS,
        op="prefill",
    ),
    "model": Suite(
        "a whole model",
        ("model.",),
        model=True,
        no_use=("preset", "layer", "tier", "layers", "tokens", "oracle", "seed"),
    ),
}
"""Every suite by its name."""

ALL = Suite(
    "all of them",
    tuple(prefix for suite in ONE.values() for prefix in suite.checks),
    {name: part for suite in ONE.values() for name, part in suite.parts.items()},
    model=True,
)
SUITES = ONE | {"all": ALL}


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of the command, by their names."""

    preset: str | None
    checkpoint: str | None
    layer: int | None
    tier: str
    layers: int
    tokens: int
    backend: str | None
    oracle: str | None
    seed: int | None
    oracle_python: str | None

    def subject(self, suite: Suite) -> Subject:
        """The layer that a suite runs on."""
        tokens = suite.tokens or self.tokens
        oracle = self.oracle or suite.oracle
        if self.checkpoint is None:
            preset = self.preset or "qwen3.5-27b"
            return from_preset(preset, tokens, oracle, seed=self.seed, python=self.oracle_python)
        assert self.layer is not None
        return from_checkpoint(
            self.checkpoint,
            self.layer,
            tokens,
            live=self.oracle == "live",
            seed=self.seed or 0,
            python=self.oracle_python,
        )


def run(name: str, asked: Asked, report: Report) -> str:
    """Run a suite: its checks, tables and settings go to the report; returns what was verified.

    Raises:
        GDNError: there is no such layer, model, oracle or backend, or int4 cannot hold the layer.
    """
    suite = SUITES[name]
    parts = suite.parts_of(asked.tier)
    model = _model(asked, alone=not parts) if suite.model else None
    count = sum(part.stages for part in parts) + bool(parts) + (model.stages if model else 0)
    verified = ""
    with stages(count) as stage:
        if parts:
            with stage("weights and inputs"):
                subject = asked.subject(suite)
            for part in parts:
                if part.takes is not None:
                    part.takes(subject.cfg)
            verified = subject.name
            report.settings |= _settings(suite, asked, subject)
            for part in parts:
                part.run(subject, report, layers=asked.layers, backend=asked.backend, stage=stage)
        if model is not None:
            key = "model_backend" if parts else "backend"
            report.settings |= {"model": model.name, key: asked.backend}
            report.settings[key] = model.run(report, backend=asked.backend, stage=stage)
    return verified or report.settings["model"]


class _Model(NamedTuple):
    """``run`` adds the checks of a whole model to a report and returns the backend it ran on."""

    name: str
    run: Callable[..., str]
    stages: int


def _model(asked: Asked, alone: bool) -> _Model:
    """The bundled checkpoint, or where no layer is asked for the one that is named."""
    if alone and asked.checkpoint is not None:
        compare = functools.partial(live.run, asked.checkpoint, python=asked.oracle_python)
        return _Model(Path(asked.checkpoint).name, compare, live.STAGES)
    return _Model(bundled.BUNDLED.name, bundled.run, bundled.STAGES)


def _settings(suite: Suite, asked: Asked, subject: Subject) -> dict[str, Any]:
    """What a report says of a run on a layer."""
    cfg, backend = subject.cfg, asked.backend
    settings: dict[str, Any] = {
        "layer": subject.name,
        "config": str(cfg),
        "layers": asked.layers,
        "backend": select_backend(suite.op, cfg, backend=backend),
        "drawn": subject.drawn,
    }
    if suite is ALL:
        settings["prefill_backend"] = select_backend("prefill", cfg, backend=backend)
    if "tier" not in suite.no_use:
        settings |= {"tier": asked.tier, "tokens": asked.tokens}
    if "oracle" not in suite.no_use:
        settings["transformers"] = subject.transformers
    return settings
