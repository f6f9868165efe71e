"""A skipped test says why, so that a tier of tests cannot vanish quietly."""

import ast
from pathlib import Path

import pytest

from house.tree import ROOT, name_of, python_files

SKIPS = {"skip", "skipif", "xfail", "importorskip", "skipTest"}


def silent_skips(source: str) -> list[int]:
    """Lines of skips without a reason (a string of some length; `reason=` or first argument)."""
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SKIPS:
            reasons = [k.value for k in node.keywords if k.arg == "reason"]
            if getattr(node.func, "attr", "") in {"skip", "skipTest"}:
                reasons += node.args[:1]
            if not any(_says_something(reason) for reason in reasons):
                lines.append(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr in SKIPS and id(node) not in called:
            lines.append(node.lineno)
    return lines


def _says_something(reason: ast.expr) -> bool:
    """A text of at least ten characters, or one put together at run time."""
    if isinstance(reason, ast.Constant):
        return isinstance(reason.value, str) and len(reason.value) >= 10
    return True


def test_every_skip_has_a_reason() -> None:
    tests = ROOT / "tests"
    found = {
        name_of(path): silent_skips(path.read_text(encoding="utf-8"))
        for path in python_files()
        if tests in path.parents and path != Path(__file__)
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("@pytest.mark.skip\ndef test(): ...", 1),
        ("@pytest.mark.skip()\ndef test(): ...", 1),
        ("@pytest.mark.skipif(True, reason='')\ndef test(): ...", 1),
        ("pytest.skip('')", 1),
        ("pytest.importorskip('sklearn')", 1),
        ("@pytest.mark.xfail\ndef test(): ...", 1),
        ("@pytest.mark.skipif(no_gpu(), reason='needs a CUDA device')\ndef test(): ...", 0),
        ("pytest.skip(f'needs {n} devices')", 0),
        ("pytest.importorskip('sklearn', reason='extra `digits` is not installed')", 0),
    ],
)
def test_the_check_sees_a_silent_skip(source: str, count: int) -> None:
    assert len(silent_skips(source)) == count
