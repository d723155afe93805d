"""The guard between two processes, of which neither sees the other's loss."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import HELPERS, ROOT

PROGRAM = HELPERS / "guard_process.py"


@pytest.mark.slow
def test_one_broken_process_is_healed_and_two_end_the_run(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(process), port, str(tmp_path)], env=environment, **pipes)
        for process in range(2)
    ]
    ended = [process.communicate(timeout=280) for process in started]
    assert [process.returncode for process in started] == [0, 0], [stderr[-2000:] for _, stderr in ended]
    said = [[line.split() for line in stdout.splitlines() if line[:1].isdigit()] for stdout, _ in ended]
    # The capture after step 4 finds island 1 broken; it is healed when the sync is done, after step 5.
    finite = [[line[3] == "True" for line in lines] for lines in said]
    assert finite[0] == [True] * 6 + [False] * 2
    assert finite[1] == [True] + [False] * 3 + [True] * 2 + [False] * 2
    assert [line[2] for line in said[0]] == [line[2] for line in said[1]]
    assert all(line[4] == "True" for lines in said for line in lines)
    assert said[1][4][1] == said[1][4][2]  # island 1 is Theta
    for stdout, _ in ended:
        assert "RunError no island has finite numbers left after step 9" in stdout
