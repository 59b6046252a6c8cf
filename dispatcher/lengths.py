"""How long a model's answers get when nobody sets a ceiling: learned from answers, shared through Redis.

Whoever plans a batch goes by it (`batches.intake`); how fast workers write is `speeds`' subject. The one door
to its key. Methods raise StoreUnavailable when Redis does not answer.
"""

from __future__ import annotations

import re
from collections import defaultdict

from workers import keys
from workers.connection import AsyncRedis, text_fields, translated
from workers.scripts import Scripts

INTERVAL_S = 2.0
"""How often what was seen is written, in seconds: Redis shall not hear of each answer."""
REMEMBERED = 1000
"""So many answers make a mean; beyond that, new ones take the place of old ones."""
MOST_MODELS = 1024
"""Models of which a mean is kept: lines name them, and may name anything."""
TTL_S = 30 * 86_400
_MEAN = re.compile(r"\bmean=([\d.]+)")


class AnswerLengths:
    """Mean lengths in one Redis, in tokens, by model; "" stands for requests that name none."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._scripts = Scripts(client, "dispatcher")
        self._seen: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def saw(self, model: str | None, tokens: int | None, *, asked_tokens: int | None) -> None:
        """An answer came. With a ceiling it does not say how long it would have got; nor does None."""
        if tokens and asked_tokens is None:
            seen = self._seen[model or ""]
            seen[0] += 1
            seen[1] += tokens

    async def flush(self) -> None:
        """Write what was seen since the last time; what cannot be written is kept for the next."""
        if not self._seen:
            return
        seen = dict(self._seen)
        args: list[str | int | float | bytes] = [REMEMBERED, MOST_MODELS, TTL_S]
        for model, (count, tokens) in seen.items():
            args += [model, count, tokens]
        await self._scripts.run("note_lengths", [keys.ANSWERS.of()], args)
        for model, (count, tokens) in seen.items():
            left = self._seen[model]
            left[0] -= count
            left[1] -= tokens
            if not left[0]:
                del self._seen[model]

    async def means(self) -> dict[str, float]:
        """What is known of each model; one that is not there is unknown."""
        with translated():
            fields = text_fields(await self._client.hgetall(keys.ANSWERS.of()))
        found = {model: _MEAN.search(text) for model, text in fields.items()}
        return {model: float(mean[1]) for model, mean in found.items() if mean is not None}
