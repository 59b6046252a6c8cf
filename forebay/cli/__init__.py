"""The command line: flags in, tables, JSON and exit codes out.

What a command does is done by ``forebay.client`` and ``forebay.run``, so that programs can do it too.
"""
