"""``sangam loadtest``: the names of its commands; what they do is decided in their modules.

Loaded by the ``sangam`` command through the entry-point group ``sangam.commands``.
"""

import typer

from sangam_loadtest.capacity_command import capacity_command
from sangam_loadtest.fit_command import fit_command
from sangam_loadtest.recommend_command import recommend_command
from sangam_loadtest.report_command import report_command
from sangam_loadtest.run_command import run_command
from sangam_loadtest.simulate_command import simulate_command

app = typer.Typer(
    help="Load tests, capacity, simulation and reports.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def loadtest() -> None:
    """Load tests, capacity, simulation and reports."""


app.command("run")(run_command)
app.command("capacity")(capacity_command)
app.command("fit")(fit_command)
app.command("simulate")(simulate_command)
app.command("recommend")(recommend_command)
app.command("report")(report_command)
