"""docs/faults.md names tests that exist, and leaves none of its numbers out."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")


def test_every_test_on_the_page_is_one_of_ours() -> None:
    ours = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    named = set(re.findall(r"\btest_\w+", PAGE))
    assert len(named) > 50
    assert named - ours == set()


def test_every_number_has_a_row_with_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    numbers = [int(row[0]) for row in rows]
    assert numbers == list(range(83, 105))
    assert all("test_" in row[3] for row in rows)
