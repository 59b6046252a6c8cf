"""How a run ended, for a person: who did what, how long it took, how near that is to the possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from forebay import tally
from forebay.cli.tables import rate, share_table
from forebay.durations import clock
from forebay.results import lines_of
from forebay.run import Outcome
from forebay.tally import Share


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time that the fleet could have taken; ``source`` says where its capacity is from."""

    seconds: float
    capacity_tokens_per_s: float
    source: str


def shares_of(outcome: Outcome) -> Mapping[str, Share]:
    """Result lines by worker, from the files; empty when they do not name any."""
    saved = outcome.saved
    paths = [] if saved is None else [path for path in (saved.output, saved.errors) if path is not None]
    return tally.count(line for path in paths for line in lines_of(path))


def bound_of(outcome: Outcome, known_tokens_per_s: float | None) -> Bound | None:
    """Tokens generated over the capacity of the fleet: the one that is known, else the monitor's estimate.

    None when no tokens were counted, or neither is there.
    """
    tokens = outcome.record.usage.output_tokens if outcome.record.usage else 0
    capacity = known_tokens_per_s or tally.estimated_capacity(outcome.workers)
    if not tokens or not capacity:
        return None
    source = "known" if known_tokens_per_s else "the highest rate seen"
    return Bound(tally.lower_bound_s(tokens, capacity), capacity, source)


def show(console: Console, outcome: Outcome, *, known_tokens_per_s: float | None = None) -> None:
    """Print the summary of a run that was not interrupted."""
    shares = shares_of(outcome)
    if shares:
        console.print(share_table(shares))
        console.print()
    sent_again = sum(share.sent_again for share in shares.values())
    for line in _lines(outcome, bound_of(outcome, known_tokens_per_s), sent_again):
        console.print(Text(line), soft_wrap=True)


def _lines(outcome: Outcome, bound: Bound | None, sent_again: int) -> list[str]:
    counts = outcome.record.request_counts
    usage = outcome.record.usage
    generated = usage.output_tokens if usage else 0
    pace = rate(generated / outcome.batch_s) if outcome.batch_s > 0 else "-"
    head = (
        f"{outcome.record.status}: {counts.completed:,} done, {counts.failed:,} failed of {counts.total:,} "
        f"in {clock(outcome.elapsed_s)}; {generated:,} tokens generated, {pace} tokens/s"
    )
    lines = [head]
    if bound is not None:
        lines.append(
            f"time over the lower bound: {outcome.batch_s / bound.seconds:.2f} "
            f"({outcome.batch_s:.1f} s over {bound.seconds:.1f} s, tokens over capacity: "
            f"{rate(bound.capacity_tokens_per_s)} tokens/s, {bound.source})"
        )
    if sent_again:
        lines.append(f"sent more than once: {sent_again:,} lines, after a failure or on a faster worker")
    if outcome.saved is not None:
        lines += [f"results: {outcome.saved.output}"] if outcome.saved.output else []
        lines += [f"failed lines: {outcome.saved.errors}"] if outcome.saved.errors else []
    return lines
