"""What everyone agrees on: a worker's record, load, breaker, leases, limit, and their one door to Redis.

A *worker* is one inference server at one URL. Nothing here imports monitor, dispatcher or forebay.
"""
