"""What a run tells of each thing that happened: a line of text for a person, a line of JSON for a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos.actor import Happened
from tests.chaos.check import Findings
from tests.chaos.recovery import recovery_s

_NAMED = 5


@dataclass(slots=True)
class Story:
    """One batch, from its input to its end. Times are seconds since the start."""

    batch_id: str
    begun_s: float
    ended_s: float
    status: str
    resumed: int
    """How often an operator had to resume it."""
    repeated: int
    """Lines of which two results became durable: they were sent again while, or before, one did."""
    findings: Findings


@dataclass(slots=True)
class Summary:
    """A whole run."""

    seed: int
    lasted_s: float = 0.0
    faults: list[Happened] = field(default_factory=list)
    stories: list[Story] = field(default_factory=list)
    progress_s: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Violations that are no batch's: what was left behind, what ended badly."""

    @property
    def good(self) -> bool:
        return not self.complaints and all(story.findings.good for story in self.stories)

    @property
    def recoveries(self) -> dict[str, float]:
        """By kind of fault, the longest time from its end to the next durable result; seconds."""
        longest: dict[str, float] = {}
        for happened in self.faults:
            took_s = recovery_s(happened.ended_s, self.progress_s)
            if took_s is not None:
                kind = happened.fault.kind.value
                longest[kind] = max(longest.get(kind, 0.0), took_s)
        return longest

    def totals(self) -> dict[str, Any]:
        """What counts, in one record."""
        findings = [story.findings for story in self.stories]
        return {
            "seed": self.seed,
            "lasted_s": round(self.lasted_s, 1),
            "faults": len(self.faults),
            "faults_by_kind": dict(sorted(Counter(one.fault.kind.value for one in self.faults).items())),
            "batches": len(self.stories),
            "batches_by_status": dict(sorted(Counter(story.status for story in self.stories).items())),
            "lines_checked": sum(each.lines for each in findings),
            "lost": sum(len(each.lost) for each in findings),
            "doubled": sum(len(each.doubled) for each in findings),
            "wrong": sum(len(each.wrong) for each in findings) + len(self.complaints),
            "answered_twice": sum(story.repeated for story in self.stories),
            "resumed": sum(story.resumed for story in self.stories),
            "longest_recovery_s": round(max(self.recoveries.values(), default=0.0), 1),
            "longest_recovery_s_by_kind": {kind: round(s, 1) for kind, s in sorted(self.recoveries.items())},
        }


class Report:
    """Writes as things happen."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say

    def begins(self, seed: int, folder: Path, settings: Mapping[str, Any]) -> None:
        self._write("begins", {"seed": seed, **settings})
        self._say(f"seed {seed}; logs, files and report in {folder}")

    def happened(self, happened: Happened) -> None:
        fault = happened.fault
        facts = {
            "kind": fault.kind.value,
            "whom": fault.whom,
            "began_s": round(happened.began_s, 2),
            "ended_s": round(happened.ended_s, 2),
            "note": happened.note,
        }
        self._write("fault", facts)
        note = f" ({happened.note})" if happened.note else ""
        self._say(f"{happened.ended_s:7.1f} s  ended: {fault}{note}")

    def ended(self, story: Story) -> None:
        findings = story.findings
        facts = {
            "batch": story.batch_id,
            "status": story.status,
            "begun_s": round(story.begun_s, 2),
            "ended_s": round(story.ended_s, 2),
            "lines": findings.lines,
            "lost": findings.lost,
            "doubled": findings.doubled,
            "wrong": findings.wrong,
            "answered_twice": story.repeated,
            "resumed": story.resumed,
        }
        self._write("batch", facts)
        verdict = "as it must be" if findings.good else "VIOLATED"
        took_s = story.ended_s - story.begun_s
        self._say(
            f"{story.ended_s:7.1f} s  {story.batch_id} {story.status} after {took_s:.0f} s: "
            f"{findings.lines} lines, {len(findings.lost)} lost, {len(findings.doubled)} doubled, "
            f"{story.repeated} answered twice; {verdict}"
        )
        for found in (findings.lost, findings.doubled, findings.wrong):
            self._list(found)

    def summary(self, summary: Summary) -> None:
        totals = summary.totals()
        self._write("summary", totals | {"complaints": summary.complaints, "good": summary.good})
        self._list(summary.complaints)
        for name, value in totals.items():
            self._say(f"{name.replace('_', ' '):>28}  {_spelt(value)}")
        self._say(
            "the invariant holds" if summary.good else f"THE INVARIANT IS VIOLATED, seed {summary.seed}"
        )

    def _list(self, found: Sequence[str]) -> None:
        for one in found[:_NAMED]:
            self._say(f"            {one}")
        if len(found) > _NAMED:
            self._say(f"            and {len(found) - _NAMED} more")

    def _write(self, event: str, facts: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode({"event": event, **facts}) + b"\n")


def _spelt(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)
