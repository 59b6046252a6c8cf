"""`python -m dispatcher`."""

import typer

from dispatcher.command import dispatcher

if __name__ == "__main__":
    typer.run(dispatcher)
