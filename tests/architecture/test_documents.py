"""What documents name is there: links, commands, targets of make, modules; and every word is explained."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.checkout import ROOMS, ROOT, code_of, docstring, dotted, files, modules, rows
from tests.commands import complaint, in_shell

PAGES = [path for path in files() if path.suffix == ".md" and "tests" not in path.relative_to(ROOT).parts]
DECISIONS = ROOT / "docs" / "decisions"
WORDS = {
    "worker", "runtime", "fleet", "monitor", "dispatcher", "job", "request", "batch", "shard", "load",
    "lease", "limit", "memo (absence memo)", "incarnation", "breaker", "deferral", "outcome", "decision",
}  # fmt: skip
"""What a reader of code, logs or metrics meets first; the glossary may explain more."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def shell_of(page: Path) -> str:
    return "\n".join(re.findall(r"(?s)```sh\n(.*?)```", text_of(page)))


def anchors(page: Path) -> set[str]:
    """The fragments by which a page's headings are linked."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?s)```.*?```", "", text_of(page)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?s)```.*?```", "", text_of(page))):
        if target.startswith("https://"):
            continue
        name, _, fragment = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        if not found.exists() or (fragment and fragment not in anchors(found)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_in_a_page_is_a_command_with_flags_that_it_has(page: Path):
    inline = [code for code in re.findall(r"`(forebay [^`]+)`", text_of(page)) if code.split()[1] in COMMANDS]
    shell = "\n".join([shell_of(page), *inline])
    said = {" ".join(words): complaint(words) for words in in_shell(shell) if "..." not in words}
    assert {words: why for words, why in said.items() if why} == {}


COMMANDS = {
    "run",
    "submit",
    "wait",
    "status",
    "results",
    "cancel",
    "enqueue",
    "workers",
    "monitor",
    "dispatcher",
}


def test_the_readme_shows_the_commands_that_matter():
    shown = {words[0] for words in in_shell(shell_of(ROOT / "README.md"))}
    assert {"run", "monitor", "dispatcher", "workers", "submit", "wait", "results"} <= shown


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_target_of_make_in_a_page_exists(page: Path):
    targets = set(re.findall(r"(?m)^([a-z-]+):", text_of(ROOT / "Makefile")))
    shown = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", text_of(page)))
    assert shown <= targets


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_module_in_a_page_exists(page: Path):
    prose = re.sub(r"(?s)```.*?```", "", text_of(page))
    names = {code for code in code_of(prose) if re.fullmatch(rf"(?:{'|'.join(ROOMS)})(\.[a-z_]+)+", code)}
    names -= {"forebay.toml", "forebay.strategy", "workers.env"}  # files, and a key of a line
    assert {name for name in names if not exists(name)} == set()


def exists(name: str) -> bool:
    """Whether there is such a module, or such a thing in a module."""
    parent, _, last = name.rpartition(".")
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        found = find_spec(parent)
        assert found is not None
        assert found.origin is not None
        return f"def {last}(" in text_of(Path(found.origin)) or f"class {last}" in text_of(Path(found.origin))


def test_every_word_that_matters_is_explained_once():
    explained = [row[0] for row in rows(ROOT / "docs" / "glossary.md", below="Glossary")]
    assert WORDS - set(explained) == set()
    assert len(explained) == len(set(explained))


def test_decisions_are_numbered_listed_and_say_what_was_refused():
    pages = sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")
    assert pages
    numbers = [path.name[:4] for path in pages]
    assert len(numbers) == len(set(numbers))
    for path in pages:
        assert path.name in text_of(DECISIONS / "README.md"), f"{path.name} is not listed"
        assert text_of(path).startswith(f"# {path.name[:4]} ")
        assert {"context", "decision", "consequences"} <= anchors(path)
        assert "refused" in text_of(path).lower()


def test_fragments_of_the_changelog_are_named_by_what_they_tell():
    for path in (ROOT / "changelog.d").iterdir():
        assert path.name == "README.md" or re.fullmatch(
            r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", path.name
        )
        assert text_of(path).strip().endswith(".")


# -- the code as prose ------------------------------------------------------------------------------------


def test_every_module_says_first_what_belongs_in_it():
    assert [dotted(path) for path in modules() if len(docstring(path)) < len("Does something.")] == []


def test_nothing_is_left_for_later_and_no_machine_is_named():
    # Spelled in two halves, so that this file does not find itself.
    later = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))
    homes = "|".join(("/ro" + "ot/", "/ho" + "me/", "/wo" + "rk/"))
    suspicious = re.compile(rf"\b(?:{later})\b|(?<![\w.])(?:{homes})")
    prose = [path for path in files() if path.suffix in {".py", ".lua", ".toml", ".yml", ".md", ".txt", ""}]
    found = {named(path): suspicious.findall(text_of(path)) for path in prose}
    assert {name: words for name, words in found.items() if words} == {}


def test_every_skip_and_every_silenced_check_has_its_reason_on_the_line():
    unreasoned = []
    for path in files():
        if path.suffix != ".py":
            continue
        for number, line in enumerate(text_of(path).splitlines(), 1):
            bare_noqa = re.search(r"#\s*noqa(?::\s*[A-Z0-9, ]+)?\s*$", line)
            bare_ignore = re.search(r"#\s*type:\s*ignore(\[[^]]*\])?\s*$", line)
            bare_skip = re.search(r"mark\.(skip|xfail)(\(\s*\)|\s*$)|pytest\.(skip|xfail)\(\s*\)", line)
            conditional = re.search(r"mark\.skipif\(", line) and "reason=" not in line
            if bare_noqa or bare_ignore or bare_skip or conditional:
                unreasoned.append(f"{named(path)}:{number}: {line.strip()}")
    assert unreasoned == []
