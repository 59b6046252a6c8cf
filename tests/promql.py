"""What a PromQL expression names: metrics, the labels it selects and groups by. As far as ours go.

No Prometheus runs where tests do. A word that is neither a metric, a label in its place, nor a known function
is an error, so that a slip of the pen is one. What metrics there are is the test's subject.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FUNCTIONS = {
    "absent", "count", "histogram_quantile", "increase", "label_values", "max", "min", "rate", "sum",
}  # fmt: skip
OPERATORS = {"and", "or", "unless"}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^{}]*)\}")
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^()]*)\)")
_RANGE = re.compile(r"\[(?:\d+[smhd]|\$__rate_interval)\]")
_WORD = re.compile(r"[a-zA-Z_:][\w:]*")


@dataclass(slots=True)
class Expression:
    """What one expression names."""

    metrics: set[str] = field(default_factory=set)
    selected: list[tuple[str, str, str]] = field(default_factory=list)
    """Metric, label, and the value or pattern that it is held against."""
    grouped: set[str] = field(default_factory=set)
    """Labels of `by` and `on`."""


def read(text: str) -> Expression:
    """Take an expression apart. Raises AssertionError for what is not known here."""
    found = Expression()
    assert _balanced(text), text
    rest = _RANGE.sub("", text)
    for metric, matchers in _SELECTOR.findall(rest):
        for matcher in filter(None, matchers.split(",")):
            held = _MATCHER.fullmatch(matcher)
            assert held is not None, f"{matcher!r} in {text}"
            found.selected.append((metric, held[1], held[3]))
    rest = _SELECTOR.sub(r" \1 ", rest)
    for labels in _GROUPING.findall(rest):
        found.grouped |= {label.strip() for label in labels.split(",") if label.strip()}
    rest = _GROUPING.sub(" ", rest)
    assert not re.search(r"[\"'{}\[\]$]", rest), f"not understood: {text}"
    for word in _WORD.finditer(rest):
        called = rest[word.end() :].lstrip().startswith("(")
        if word[0] in OPERATORS:
            continue
        if called:
            assert word[0] in FUNCTIONS, f"{word[0]} in {text}"
        else:
            found.metrics.add(word[0])
    return found


def _balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth < 0:
            return False
    return depth == 0
