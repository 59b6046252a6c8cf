"""``python -m forebay`` is the command ``forebay``."""

from forebay.cli.main import main

main()
