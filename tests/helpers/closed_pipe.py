"""The command with a closed pipe for its standard output."""

import os
import subprocess
import sys


def run_without_reader(args: list[str]) -> tuple[int, str]:
    """Status and stderr of the command whose standard output nobody reads any more, as in `| head -1`."""
    # Unbuffered, each write would fail where it stands; a user's Python writes when it flushes.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", "from levanter_diloco.cli import command; command()", *args]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(writer)
    return done.returncode, done.stderr
