"""``python -m monitor``: the same as ``forebay monitor``."""

import typer

from monitor.command import monitor

if __name__ == "__main__":
    typer.run(monitor)
