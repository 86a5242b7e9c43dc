"""A hook of mkdocs: Sphinx roles of docstrings become links where the site has the object."""

import re
from typing import Any

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):<code>~?([\w.]+)</code>")


def linked(html: str) -> str:
    """A rendered role as an optional link: plain code where the site has no such object."""

    def link(role: re.Match[str]) -> str:
        name = role[1]
        target = name if name.startswith("gdn_jax.") else f"gdn_jax.{name}"
        return f'<autoref optional identifier="{target}"><code>{name}</code></autoref>'

    return ROLE.sub(link, html)


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs before its references are resolved."""
    return linked(html)
