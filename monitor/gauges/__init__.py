"""From a worker's Prometheus page to its load: the contract, a mapping for each runtime, and the
reduction over ranks.

Pure but for ``scrape``, which fetches the page. What loads over time tell is ``monitor.rates``' subject.
"""
