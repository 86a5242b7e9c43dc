"""The site: its pages are in its table of contents, and the API pages name what is public."""

import re

import pytest

from docs.generate.figures.all import PICTURES
from docs.generate.figures.svg import Picture
from docs.generate.records import ROOT
from docs.generate.roles import linked
from tests.test_public_names import PUBLIC

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_is_in_the_table_of_contents() -> None:
    named = re.findall(r": (\S+\.md)$", CONFIG, re.MULTILINE)
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_public_name_stands_on_one_page_of_the_api() -> None:
    pages = (path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^::: gdn_jax\.(\S+)$", "".join(pages), re.MULTILINE)
    assert sorted(shown) == sorted(PUBLIC)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_picture_is_drawn_from_the_present_records(picture: Picture) -> None:
    stored = (DOCS / "figures" / f"{picture.name}.svg").read_text(encoding="utf-8")
    assert picture.mark() in stored, "run python -m docs.generate"
    assert stored.endswith("</svg>\n")
    assert "prefers-color-scheme:dark" in stored


def test_a_picture_is_drawn_the_same_twice() -> None:
    assert PICTURES[0].svg() == PICTURES[0].svg()


def test_every_picture_is_shown_and_every_page_shows_pictures_that_are_drawn() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    shown = set(re.findall(r"\(figures/(\w+)\.svg\)", pages))
    assert shown == {picture.name for picture in PICTURES}


def test_roles_of_docstrings_become_links() -> None:
    html = "<p>See :func:<code>decode_step</code> and :mod:<code>gdn_jax.layer.steps</code>.</p>"
    assert linked(html) == (
        '<p>See <autoref optional identifier="gdn_jax.decode_step"><code>decode_step</code>'
        '</autoref> and <autoref optional identifier="gdn_jax.layer.steps">'
        "<code>gdn_jax.layer.steps</code></autoref>.</p>"
    )
