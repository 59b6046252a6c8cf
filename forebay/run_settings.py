"""What a person asks of a run. How one begins is ``beginning``'s subject, how it goes on that of ``run``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dispatcher.batches.intake import Limits
from forebay.submission import Options
from workers.spec import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a person asks of a run.

    ``redis_url`` None: an embedded server. ``storage`` None: in the folder beside the output. ``queue`` None:
    one that only this run's dispatchers serve; another, with a Redis of others, needs a storage that they
    see. ``wait_ready_s``: how long to wait for the first ready worker.
    ``explain``: where decision records go; None: they are not kept.
    """

    input: Path
    output: Path
    errors: Path
    workers: tuple[WorkerSpec, ...]
    redis_url: str | None = None
    storage: str | None = None
    queue: str | None = None
    dispatchers: int = 1
    options: Options = field(default_factory=Options)
    wait_ready_s: float = 60.0
    overwrite: bool = False
    restart: bool = False
    keep_state: bool = False
    explain: Path | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def targets(self) -> list[Path]:
        """The files that the run writes."""
        return [self.output, self.errors, *([self.explain] if self.explain else [])]
