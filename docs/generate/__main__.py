"""``python -m docs.generate``, from the root: writes every generated page anew."""

from docs.generate.figures.all import PICTURES
from docs.generate.pages import PAGES
from docs.generate.records import ROOT

for path, make in PAGES.items():
    (ROOT / path).write_text(make(), encoding="utf-8")
for picture in PICTURES:
    (ROOT / "docs" / "figures" / f"{picture.name}.svg").write_text(picture.svg(), encoding="utf-8")
