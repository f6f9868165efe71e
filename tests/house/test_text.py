"""No text names a machine, a private folder or where packages come from.

The repository must install from whatever registry and into whatever folder its user has. Patterns
are put together from pieces, so that this file passes its own test.
"""

import re
from pathlib import Path

import pytest

from house.tree import name_of, repository_files

DOT = re.escape(".")
BANNED = {
    "a package registry's host": "|".join(
        name + DOT + top
        for name, top in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download" + DOT + "pytorch", "org"),
            ("anaconda", "(org|com)"),
            ("registry" + DOT + "npmjs", "org"),
            ("pypi" + DOT + "nvidia", "com"),
        )
    ),
    "a choice of package index": "-" + "-(extra-)?index-url|-" + "-find-links",
    "an absolute path of one machine": r"(?<![\w$}.~/-])/(home|root|work|Users)(?=/|[\s\"'`,;)]|$)",
    "a folder outside the repository": DOT + DOT + "/" + "shared",
}


def faults(text: str) -> list[str]:
    """Line and reason of each banned piece of text."""
    return [
        f"{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in BANNED.items()
        if re.search(pattern, line)
    ]


def text_of(path: Path) -> str:
    """Content of a text file; empty for a binary one."""
    data = path.read_bytes()
    return "" if b"\0" in data[:8192] else data.decode("utf-8")


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = {name_of(path): faults(text_of(path)) for path in repository_files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "https://" + "pypi" + ".org/simple",
        "pip install --" + "index-url x",
        "cd " + "/" + "home/me/code",
        'path = "' + "/" + 'root"',
        ".." + "/shared/notes.md",
    ],
)
def test_the_check_sees_it(text: str) -> None:
    assert len(faults(text)) == 1


@pytest.mark.parametrize(
    "text", ["$HOME/photos", "data/work/x", "https://example.com/home/x", "${ROOT}/work/"]
)
def test_the_check_leaves_others_alone(text: str) -> None:
    assert faults(text) == []
