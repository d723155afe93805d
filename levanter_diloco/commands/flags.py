"""Command-line flags of our own tools: what is wrong with them is said in one line."""

import argparse
import re
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Exits with 2 and one line on bad flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"levanter-diloco: {' '.join(message.split())}\n")


def count(text: str) -> int:
    """Reads a whole number of at least 1."""
    if not re.fullmatch("[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"({text}) must be a whole number of at least 1; 2 works.")
    return int(text)
