"""The service that watches workers and writes what it learns of each to Redis: load, memo, limit, breaker.

What a worker's numbers mean to the choice of workers is the dispatcher's subject; the two meet in Redis only.
"""
