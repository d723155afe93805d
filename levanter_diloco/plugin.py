"""The entry point `diloco` of the group `levanter.plugins`: makes this package's names known to the host."""


def register() -> None:
    """Registers what YAML can name: the outer optimizers and the JSON-lines tracker."""
    from . import config, json_lines  # noqa: F401  importing them registers their names
