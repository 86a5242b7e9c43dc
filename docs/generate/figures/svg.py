"""A figure as an SVG file that brings its own background, light or dark as the reader prefers."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from gdn_jax.report.svg import to_svg

LOOK = (
    "<style>svg{color:#1f2328;background:#ffffff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3;background:#161b22}}"
    "text{font-family:'DejaVu Sans',Verdana,sans-serif!important}</style>"
)


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure by the name of its file: what is drawn, how, and where the numbers are from."""

    name: str
    data: Callable[[], Any]
    draw: Callable[[Any], Figure]

    def svg(self) -> str:
        """The file; its second line is :meth:`digest`."""
        data = self.data()
        text = to_svg(self.name, lambda: self.draw(data))
        head, body = text.split(">", 1)
        return f"{head}>\n{self.mark()}\n{LOOK}{body}"

    def mark(self) -> str:
        """A line that changes when what is drawn changes, whatever draws it on whatever machine."""
        drawn = json.dumps(self.data(), sort_keys=True, ensure_ascii=False)
        return f"<!-- drawn from {hashlib.sha256(drawn.encode()).hexdigest()} -->"
