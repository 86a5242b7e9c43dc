"""The table of suites: every check belongs to one, and what a suite has no use for is an option."""

import dataclasses

import pytest

from gdn_jax.cli.verify import verify
from gdn_jax.verify.catalogue import CATALOGUE
from gdn_jax.verify.suites import ALL, ONE, SUITES, Asked


def test_every_check_is_one_suites() -> None:
    listed = [id_ for suite in ONE.values() for id_ in suite.entries]
    assert sorted(listed) == sorted(CATALOGUE)
    assert sorted(ALL.entries) == sorted(CATALOGUE)
    assert all(suite.entries for suite in ONE.values())


@pytest.mark.parametrize("name", SUITES)
def test_an_option_without_use_is_an_option(name: str) -> None:
    options = {parameter.name for parameter in verify.params}
    assert set(SUITES[name].no_use) <= options
    assert {field.name for field in dataclasses.fields(Asked)} <= options


def test_a_tier_leaves_out_the_other() -> None:
    f32, q4 = SUITES["layer"].parts.values()
    assert [SUITES["layer"].parts_of(tier) for tier in ("f32", "q4", "all")] == [
        [f32],
        [q4],
        [f32, q4],
    ]
    assert ALL.parts_of("q4") == [part for part in ALL.parts.values() if part is not f32]
    assert len(ALL.parts_of("all")) == len(ALL.parts) == 4
