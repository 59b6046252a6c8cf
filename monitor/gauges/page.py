"""A page of Prometheus text -> the samples that a mapping wants. All of them, or an error and none.

What the samples mean together belongs to ``reduce``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from monitor.gauges.contract import Field, MetricMap, MissingMetricsError, UnreadablePageError


@dataclass(frozen=True, slots=True)
class Series:
    """One sample: its labels and its value as printed (may be NaN, infinite or negative)."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of every field that was found, and the alias that each was found under."""

    series: Mapping[Field, list[Series]]
    used: Mapping[Field, str]


class PageReader:
    """Reads pages by one mapping; made once per worker and incarnation: the names are laid out ahead."""

    def __init__(self, mapping: MetricMap) -> None:
        self._mapping = mapping
        self._alias_of = {
            spelling: name
            for names in mapping.aliases.values()
            for name in names
            # prometheus_client >= 0.23 prints underscores where colons were, by the Accept header it gets
            # [prometheus/client_python#1177]; proxies ask for us in their own way.
            for spelling in (name, name.replace(":", "_"))
        }

    def read(self, page: str) -> Page:
        """Raises UnreadablePageError or MissingMetricsError; then nothing of the page may be used."""
        found = self._parse(self._cut(page))
        used = {
            field: name
            for field, names in self._mapping.aliases.items()
            if (name := next((name for name in names if name in found), None)) is not None
        }
        missing = [
            names[0]
            for field, names in self._mapping.aliases.items()
            if field in self._mapping.mandatory and field not in used
        ]
        if missing:
            raise MissingMetricsError(missing)
        return Page({field: found[name] for field, name in used.items()}, used)

    def _cut(self, page: str) -> list[str]:
        """The wanted lines. Parsing all of a page costs 30 times as much as parsing these."""
        if page and not page.endswith("\n") and page.rpartition("\n")[2].strip() != "# EOF":
            raise UnreadablePageError("the metrics page is cut off: its last line has no end")
        aliases = self._alias_of
        return [
            line
            for line in page.split("\n")
            if line and line[0] != "#" and line.partition("{")[0].partition(" ")[0] in aliases
        ]

    def _parse(self, lines: list[str]) -> dict[str, list[Series]]:
        # Without TYPE lines the parser keeps every sample under its exact name: no family, no prefix.
        found: dict[str, list[Series]] = {}
        try:
            for family in text_string_to_metric_families("\n".join(lines)):
                for sample in family.samples:
                    alias = self._alias_of[sample.name]
                    found.setdefault(alias, []).append(Series(sample.labels, float(sample.value)))
        except (ValueError, IndexError, KeyError) as error:
            raise UnreadablePageError("a line of the metrics page does not parse") from error
        return found
