"""``sangam loadtest``: the names of its commands; what they do is decided in their modules.

Loaded by the ``sangam`` command through the entry-point group ``sangam.commands``.
"""

import typer

app = typer.Typer(
    help="Load tests, capacity, simulation and reports.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def loadtest() -> None:
    """Load tests, capacity, simulation and reports."""
