"""Two processes that are killed at random moments, also in a save; scripts/soak.py does it for longer."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytestmark = [pytest.mark.entry, pytest.mark.slow]

SOAK = ROOT / "scripts" / "soak.py"


def test_weights_and_metadata_written_apart_lose_nothing_to_a_kill(tmp_path: Path) -> None:
    # Streaming, V = 1, alpha = 0.5, int8: kills 1 and 3 come while a checkpoint has its arrays and not its metadata.
    command = [sys.executable, str(SOAK), "kills", "--kills", "3", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("kill ")]) == 3
    assert lines[-1].startswith("3 kills, ") and "bit-equal: True" in lines[-1]
