#!/usr/bin/env bash
# Runs the tests, two files at a time; arguments go to pytest, e.g. `scripts/test.sh -m "not slow"`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# A worker that dies ends the run: xdist, told to replace it, can wait forever for the tests that were its own.
# The files keep the order of tests/conftest.py, longest first; xdist's own puts those of few tests last, however long.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
