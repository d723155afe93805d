#!/usr/bin/env bash
# Runs the tests, two files at a time; arguments go to pytest, e.g. `scripts/test.sh -m "not slow"`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
