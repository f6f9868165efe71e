# Shared set-up, to be sourced: goes to the repository's root, makes .venv and installs the package
# with what its scripts need. Does nothing when pins and dependencies are unchanged.
#
# In:  PYTHON (optional): the interpreter to build .venv with, 3.10 or newer; default python3.
# Out: $python, the interpreter of .venv.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

set_up() {
    local base="${PYTHON:-python3}" stamp=.venv/.installed key torch
    if ! .venv/bin/python -c '' 2>/dev/null; then
        if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "needs Python >= 3.10; '$base' is not: set PYTHON to one that is" >&2
            return 1
        fi
        "$base" -m venv --clear .venv
    fi
    python="$PWD/.venv/bin/python"
    # The folder is part of the key: an editable install points to it.
    key="$("$python" - <<'PY'
import hashlib, os, pathlib, sys
text = "".join(pathlib.Path(f).read_text() for f in ("pyproject.toml", "constraints.txt"))
print(hashlib.sha256((text + os.getcwd() + sys.version).encode()).hexdigest())
PY
)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
        return 0
    fi
    echo "== installing into .venv (a few minutes the first time)"
    torch="$(sed -n 's/^torch==//p' constraints.txt)"
    # torch first, so that nothing else decides its version or build; the build backend beside it,
    # so that the pinned one is used. Python compiles what is imported, a fraction of it all.
    set -- -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
    "$python" "$@" "torch==$torch" hatchling editables
    "$python" "$@" --no-build-isolation --editable '.[emoji,digits,dev]'
    echo "$key" >"$stamp"
}

set_up
