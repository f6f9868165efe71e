"""Files and functions stay small enough to read in one go."""

import ast

from house.tree import name_of, python_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# "file" or "file::function" -> why it may be longer. Entries may go, none may come.
EXCEPTIONS: dict[str, str] = {}
MAX_EXCEPTIONS = 0


def too_long(name: str, text: str) -> dict[str, int]:
    """Name -> lines of a file and of its functions over the limits; docstrings are free."""
    found = {}
    if (lines := len(text.splitlines())) > MAX_FILE_LINES:
        found[name] = lines
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _lines(node)
            if ast.get_docstring(node) is not None:
                lines -= _lines(node.body[0])
            if lines > MAX_FUNCTION_LINES:
                found[f"{name}::{node.name}"] = lines
    return found


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_and_functions_are_short() -> None:
    found: dict[str, int] = {}
    for path in python_files():
        found |= too_long(name_of(path), path.read_text(encoding="utf-8"))
    assert {name: lines for name, lines in found.items() if name not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(found), "short enough now: take them off the list"


def test_the_list_of_exceptions_only_shrinks() -> None:
    assert len(EXCEPTIONS) == MAX_EXCEPTIONS, "lower MAX_EXCEPTIONS with the list; never raise it"
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


def test_no_file_is_called_utils() -> None:
    banned = {"util.py", "utils.py", "helpers.py", "misc.py"}
    assert [name_of(p) for p in python_files() if p.name in banned] == []


def test_the_check_sees_a_long_function_and_a_long_file() -> None:
    body = "\n".join(["    pass"] * MAX_FUNCTION_LINES)
    assert too_long("x.py", f"def f():\n{body}\n") == {"x.py::f": MAX_FUNCTION_LINES + 1}
    documented = '    """One.\n\n    Two.\n    """\n' + body.removeprefix("    pass\n")
    assert too_long("x.py", f"def f():\n{documented}\n") == {}
    assert too_long("x.py", "x = 1\n" * 401) == {"x.py": 401}
