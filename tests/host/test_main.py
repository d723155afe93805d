"""Names of the host's `main` that are replaced while it runs."""

from types import SimpleNamespace
from typing import Any

import pytest
from levanter.compat import hf_checkpoints

from levanter_diloco.host.main import replaced_in


def host_load(tree: Any, path: str, **options: Any) -> tuple:
    return "host", tree, path, options


def test_names_are_ours_inside_and_the_hosts_again_after_an_error() -> None:
    host = SimpleNamespace(Trainer="its trainer", load_checkpoint=host_load)
    save = hf_checkpoints.save_hf_shards

    def load(own: Any, tree: Any, path: str, options: Any) -> tuple:
        return "ours", *own(tree, path, **options)

    # pyrefly: ignore[bad-argument-type]  any callable will do
    with pytest.raises(RuntimeError), replaced_in(host, "our trainer", load):
        assert host.Trainer == "our trainer"
        assert host.load_checkpoint("tree", "path", mesh=1) == ("ours", "host", "tree", "path", {"mesh": 1})
        assert hf_checkpoints.save_hf_shards is not save
        raise RuntimeError
    assert (host.Trainer, host.load_checkpoint) == ("its trainer", host_load)
    assert hf_checkpoints.save_hf_shards is save
