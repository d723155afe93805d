"""Plugins: entry points of the group `levanter.plugins`, which make names known that YAML can use."""

from importlib.metadata import entry_points

from ..errors import OptionError

GROUP = "levanter.plugins"


def load_plugins(others_only: bool = False) -> None:
    """Loads every entry point of the group: a module registers by being imported, a function by being called.

    Args:
        others_only: Leaves out this package's own, which imports the host.

    Raises:
        OptionError: If one does not load.
    """
    own = __name__.partition(".")[0]
    for plugin in entry_points(group=GROUP):
        if others_only and plugin.module.partition(".")[0] == own:
            continue
        try:
            loaded = plugin.load()
        except (ImportError, AttributeError) as error:
            package = plugin.dist.name if plugin.dist else "unknown"
            raise OptionError(
                f"the plugin {plugin.name} = {plugin.value} of the package {package} does not load: {error}"
            ) from error
        if callable(loaded):
            loaded()
