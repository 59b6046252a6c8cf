"""Prometheus text written by hand: families and samples, in the order in which they are added.

Belongs here: the syntax alone. Written here rather than by prometheus_client, because a simulated page must
hold the traps of real ones (``_created`` gauges, names with colons) and not what a registry would make of
them.
"""

from __future__ import annotations

from typing import Literal

from prometheus_client.utils import floatToGoString

Kind = Literal["counter", "gauge", "histogram"]


class Page:
    """One metrics page; ``labels`` stand in every sample, sorted by name with the sample's own."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def family(self, name: str, kind: Kind, text: str) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}\n")

    def sample(self, name: str, value: float, **labels: str) -> None:
        every = {**self._labels, **labels}
        inside = ",".join(f'{key}="{_escaped(every[key])}"' for key in sorted(every))
        self._lines.append(
            f"{name}{{{inside}}} {_number(value)}\n" if every else f"{name} {_number(value)}\n"
        )

    def bare(self, name: str, value: float) -> None:
        """A sample without any label."""
        self._lines.append(f"{name} {_number(value)}\n")

    def gauge(self, name: str, text: str, value: float) -> None:
        """A gauge with one sample."""
        self.family(name, "gauge", text)
        self.sample(name, value)

    def histogram(self, name: str, text: str, bounds: tuple[float, ...], count: int, total: float) -> None:
        """A histogram whose observations all fell below its first bound: real lines, at no cost."""
        self.family(name, "histogram", text)
        for bound in (*bounds, float("inf")):
            self.sample(f"{name}_bucket", count, le=_number(bound))
        self.sample(f"{name}_count", count)
        self.sample(f"{name}_sum", total)

    def append(self, other: Page) -> None:
        """Add the lines of a page with other labels."""
        self._lines += other._lines

    def text(self) -> bytes:
        return "".join(self._lines).encode()


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # the library annotates none of utils
    return text


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
