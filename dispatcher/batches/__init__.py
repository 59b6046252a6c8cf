"""The Batch file contract: parse, plan, shards, parts, results, the record, and where all of it is kept.

No request is sent from here, and no job queued: a batch is its files and its entry in the ledger.
"""
