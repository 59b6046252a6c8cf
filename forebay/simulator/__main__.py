"""``python -m forebay.simulator``: the command by itself."""

import typer

from forebay.simulator.command import simulate_engine

if __name__ == "__main__":
    typer.run(simulate_engine)
