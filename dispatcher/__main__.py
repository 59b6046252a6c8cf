"""`python -m dispatcher`."""

import typer

from dispatcher.command import dispatcher

app = typer.Typer(pretty_exceptions_enable=False)  # a log is no place for a framed traceback
app.command()(dispatcher)

if __name__ == "__main__":
    app()
