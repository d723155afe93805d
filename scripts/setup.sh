#!/usr/bin/env bash
# Makes .venv in the repository root with everything this project needs; returns at once when it is up to date.
# PYTHON=/path/to/python picks the interpreter; otherwise the first Python >= 3.12 that is found is used.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

new_enough() { # Runs it: a pyenv shim can be on PATH and still not work.
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        new_enough "$PYTHON" || { echo "setup: PYTHON=$PYTHON is not a working Python >= 3.12" >&2; return 1; }
        echo "$PYTHON"
        return
    fi
    for candidate in python3.13 python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python; do
        new_enough "$candidate" && { echo "$candidate"; return; }
    done
    echo "setup: no Python >= 3.12 found on PATH or under pyenv; install one, or set PYTHON=/path/to/python" >&2
    return 1
}

describe() { # What a virtual environment is bound to: this folder, this interpreter.
    "$1" -c 'import sys; print(sys.version, sys.argv[1])' "$root"
}

python=$(find_python)
bound_to=$(describe "$python")
stamp="$bound_to $(cat pyproject.toml constraints.txt | cksum)"
[[ -x .venv/bin/python && $(cat .venv/stamp 2>/dev/null || true) == "$stamp" ]] && exit 0

echo "setup: installing into .venv with $("$python" -V) (about 2 GB; a few minutes the first time)"
rm -f .venv/stamp
if [[ $(describe .venv/bin/python 2>/dev/null || true) != "$bound_to" ]]; then
    "$python" -m venv --clear .venv ||
        { echo "setup: $python cannot make a virtual environment; on Debian install python3-venv" >&2; exit 1; }
fi
.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
echo "$stamp" >.venv/stamp
echo "setup: done"
