"""Which worker a request goes to: filters, scorers, pickers, and the strategies that name them. Pure.

A decision is a value. Leases, waiting for room and trying elsewhere are done by ``placement`` and
``attempts``.
"""
