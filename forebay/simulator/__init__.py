"""A fake inference engine, for demos and tests: one process that answers as vLLM or SGLang would.

Belongs here: nothing but this line; what can be used is imported from ``settings``, ``server``, ``process``,
``faults`` and ``command``.
"""
