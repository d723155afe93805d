"""Whether the arrays of a checkpoint are those of a run, by names and shapes."""

from pathlib import Path
from typing import Any

import haliax as hax
import jax.numpy as jnp
import pytest
from haliax import Axis
from levanter.checkpoint import save_checkpoint

from levanter_diloco.checkpoint.compatibility import check_model
from levanter_diloco.errors import ModelError

Embed, Wide = Axis("embed", 3), Axis("embed", 4)


def params(**changes: Any) -> dict[str, Any]:
    return {"head": hax.zeros(Embed), "norm": hax.zeros(Embed)} | changes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("saved") / "step-1"
    save_checkpoint({"model": params(), "step": jnp.zeros(())}, 1, str(folder))
    return str(folder)


def test_same_parameters_pass(saved: str) -> None:
    check_model(saved, params())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"bias": hax.zeros(Embed)}, "which lacks model/bias"),
        ({"head": hax.zeros(Wide)}, r"where model/head has the shape \[3\] and here \[4\]"),
        ({"norm": None}, "which holds model/norm besides"),
    ],
)
def test_other_parameters_are_refused_by_name(other: dict[str, Any], words: str, saved: str) -> None:
    with pytest.raises(ModelError, match=rf"is of another model, {words}; the model block that it was trained with"):
        check_model(saved, params(**other))


def test_partial_checkpoint_may_lack_some_but_fit_it_must(saved: str) -> None:
    check_model(saved, params(bias=hax.zeros(Embed)), partial=True)
    with pytest.raises(ModelError, match="has the shape"):
        check_model(saved, params(head=hax.zeros(Wide)), partial=True)
