"""Plugins: entry points of the group `levanter.plugins`, which make names known that YAML can use."""

from importlib.metadata import entry_points

from ..errors import OptionError

GROUP = "levanter.plugins"


def load_plugins() -> None:
    """Loads every entry point of the group: a module registers by being imported, a function by being called.

    Raises:
        OptionError: If one does not load.
    """
    for plugin in entry_points(group=GROUP):
        try:
            loaded = plugin.load()
        except (ImportError, AttributeError) as error:
            package = plugin.dist.name if plugin.dist else "unknown"
            raise OptionError(
                f"the plugin {plugin.name} = {plugin.value} of the package {package} does not load: {error}"
            ) from error
        if callable(loaded):
            loaded()
