"""How every command ends on an error: one line, and an exit status.

Called by ``sangam``, ``kubectl sangam`` and the load test's commands.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from sangam_core.errors import SangamError


@contextmanager
def errors_told() -> Iterator[None]:
    """Turns an error that Sangam raised on purpose into its text and exit status 1."""
    try:
        yield
    except SangamError as error:
        console = Console(stderr=True, highlight=False)
        console.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
