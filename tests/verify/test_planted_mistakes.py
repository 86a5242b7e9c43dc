"""A wiring mistake planted in the layer is caught by verify, which names where it starts.

The tiers run by themselves on one subject; tests/cli/test_cli.py plants one for the command.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

import gdn_jax as gdn
from gdn_jax.layer import steps
from gdn_jax.report.progress import stages
from gdn_jax.report.record import Check, Report
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.layer import float32, int4
from gdn_jax.verify.layer.device_run import DeviceRun
from gdn_jax.verify.subject import Subject, from_preset
from tests.support.tools import forget_programs

Patch = Callable[[pytest.MonkeyPatch], None]


def roles_of_b_and_a_swapped(patch: pytest.MonkeyPatch) -> None:
    honest = steps.input_projections

    def planted(params: gdn.GDNParams, x: jax.Array):
        b, a = params.in_proj_a, params.in_proj_b
        return honest(dataclasses.replace(params, in_proj_b=b, in_proj_a=a), x)

    patch.setattr(steps, "input_projections", planted)


def value_heads_tiled(patch: pytest.MonkeyPatch) -> None:
    honest = steps.delta_rule

    def planted(q, k, v, g, beta, S):
        groups = v.shape[-2] // k.shape[-2]
        q, k = (jnp.concatenate([x] * groups, axis=-2) for x in (q, k))
        return honest(q, k, v, g, beta, S)

    patch.setattr(steps, "delta_rule", planted)


def history_of_outputs(patch: pytest.MonkeyPatch) -> None:
    honest = steps.causal_conv

    def planted(qkv, hist, weight):
        out, new = honest(qkv, hist, weight)
        return out, jnp.concatenate([new[..., :-1, :], out[..., None, :]], axis=-2)

    patch.setattr(steps, "causal_conv", planted)


def q_and_k_exchanged(patch: pytest.MonkeyPatch) -> None:
    honest = steps.split_heads

    def planted(qkv, cfg):
        q, k, v = honest(qkv, cfg)
        return k, q, v

    patch.setattr(steps, "split_heads", planted)


def g_of_one_head_taken_as_beta(patch: pytest.MonkeyPatch) -> None:
    honest = steps.input_projections

    def planted(params, x):
        qkv, z, b, a, beta, g = honest(params, x)
        return qkv, z, b, a, beta.at[..., 1].set(g[..., 1]), g

    patch.setattr(steps, "input_projections", planted)


def scales_of_the_neighbouring_row(patch: pytest.MonkeyPatch) -> None:
    honest = int4.Q4Pool

    def planted(arrays):
        return honest(
            {
                key: dataclasses.replace(w, scales=jnp.roll(w.scales, 1, axis=0))
                for key, w in arrays.items()
            }
        )

    patch.setattr(int4, "Q4Pool", planted)


@functools.cache
def subject() -> Subject:
    return from_preset("tiny", 5, "shipped")


@pytest.fixture(autouse=True)
def _traced_afresh() -> Iterator[None]:
    """The jitted functions of verify keep what they traced, planted or not."""
    forget_programs()
    yield
    forget_programs()


@pytest.fixture(autouse=True)
def _only_what_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of bits and the runs of many tokens: most of what verify compiles."""
    for name in ("cross_layer", "reset_replay", "repeat", "host_vs_device"):
        monkeypatch.setattr(DeviceRun, name, lambda self, *_: self.readback())
    monkeypatch.setattr(float32, "_residency", lambda this, _: this.readback())
    monkeypatch.setattr(float32, "_drift", lambda *_: None)
    monkeypatch.setattr(int4, "residency_check", lambda *_: check("q4.residency", 0, 0, ""))
    monkeypatch.setattr(int4, "_drift_rows", lambda *_: [])


def checks(tier: str) -> dict[str, Check]:
    """What the tier says of the subject, by the id of the check."""
    report = Report({}, {})
    module = {"f32": float32, "q4": int4}[tier]
    with stages(module.STAGES) as stage:
        module.run(subject(), report, layers=3, backend=None, stage=stage)
    return {one.id: one for one in report.checks}


PLACING = {"f32": "f32.operators", "q4": "q4.kernel_vs_dequantized"}


@pytest.mark.parametrize("tier", PLACING)
def test_without_a_mistake_every_check_is_green(tier: str) -> None:
    found = checks(tier)
    assert PLACING[tier] in found
    assert all(one.ok for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "tier", "start"),
    [
        (roles_of_b_and_a_swapped, "f32", "B, token 0"),
        (value_heads_tiled, "f32", "ON, token 0"),
        (history_of_outputs, "f32", "HIST, token 0"),
        (q_and_k_exchanged, "f32", "Q, token 0"),
        (g_of_one_head_taken_as_beta, "f32", "BETA, token 0"),
        (roles_of_b_and_a_swapped, "q4", "B, token 0"),
        (value_heads_tiled, "q4", "ON, token 0"),
        (scales_of_the_neighbouring_row, "q4", "XC, token 0"),
    ],
)
def test_it_is_caught_and_placed(
    plant: Patch, tier: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = checks(tier)
    placing = found[PLACING[tier]]
    assert not placing.ok
    assert placing.detail.startswith(f"starts at {start}")
    if tier == "f32":
        assert not found["f32.oracle"].ok
        assert not found["f32.float64"].ok
