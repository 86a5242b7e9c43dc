"""docs/cli.md: what ``--help`` says of every command."""

import click

from gdn_jax.cli.main import CONTEXT, cli

INTRO = """# Command line

Every command exits with 0 when all holds, 1 when a check fails, 2 on bad usage or bad input (one
line on standard error), and 130 after Ctrl-C. `--json FILE` writes the whole result, atomically.
`transformers` and torch are needed only to make oracles (`pip install 'gdn-jax[oracle]'`); they may
live in an environment of their own, named by `--oracle-python`. Four oracle files ship with the
package.
"""


def command_line_page() -> str:
    """A heading and a block of text a command, groups before what they hold."""
    context = click.Context(
        cli, info_name="gdn-jax", terminal_width=CONTEXT["max_content_width"], **CONTEXT
    )
    return "\n".join([INTRO, *_described(cli, context)])


def _described(command: click.Command, context: click.Context) -> list[str]:
    lines = [f"## {context.command_path}", "", "```text", command.get_help(context), "```", ""]
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            lines += _described(
                child,
                click.Context(
                    child,
                    info_name=name,
                    parent=context,
                    terminal_width=CONTEXT["max_content_width"],
                ),
            )
    return lines
