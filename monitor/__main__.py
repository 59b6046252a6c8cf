"""``python -m monitor``: the same as ``forebay monitor``."""

import typer

from monitor.command import monitor

app = typer.Typer(pretty_exceptions_enable=False)  # a log is no place for a framed traceback
app.command()(monitor)

if __name__ == "__main__":
    app()
