"""The entry point `diloco` of the group `levanter.plugins`: makes this package's names known to the host."""


def register() -> None:
    """Registers what YAML can name: the outer optimizers and the JSON-lines tracker."""
    # Importing them registers their names.
    from .options import config  # noqa: F401
    from .training import json_lines  # noqa: F401
