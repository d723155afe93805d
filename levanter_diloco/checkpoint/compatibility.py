"""Compatibility of a checkpoint with a run: whether its arrays are those of the model and of the optimizers."""

import jax
from haliax.util import is_named_array
from jaxtyping import PyTree
from levanter.utils.jax_utils import leaf_key_paths

from ..axes import Params
from ..errors import PATH, ModelError, OptionError
from ..islands.state import DiLoCoState
from .integrity import stored_arrays


def check_model(path: str, params: Params, *, partial: bool = False) -> None:
    """Refuses the checkpoint of another model.

    Args:
        path: The checkpoint.
        params: Those that it should hold, or their shapes.
        partial: Whether it may lack some.

    Raises:
        ModelError: If a parameter is not in it, or has another shape there, or if it holds others.
    """
    if (difference := _difference(path, "model", params, partial)) is not None:
        raise ModelError(
            f"the checkpoint {path} is of another model, {difference}; the model block that it was trained with "
            "works, or another trainer.id."
        )


def check_optimizers(path: str, state: DiLoCoState, outer: str, *, partial: bool) -> None:
    """Refuses a checkpoint in which an optimizer's state has another structure than in `state`.

    Args:
        path: The checkpoint.
        state: The state that it should hold, or its shapes.
        outer: What the options call the outer optimizer.
        partial: Whether it may lack some arrays.

    Raises:
        OptionError: If it has.
    """
    anew = "or another trainer.id with initialize_model_from_checkpoint_path to start anew from its outer parameters"
    options = {
        "opt_state": (f"{PATH}.outer ({outer})", state.opt_state),
        "islands/opt_state": ("optimizer", state.islands.opt_state),
    }
    for subtree, (option, opt_state) in options.items():
        difference = _difference(path, subtree, opt_state, partial)
        if difference is not None:
            raise OptionError(
                f"{option} must have the state that the checkpoint {path} holds, {difference}; the optimizer it was "
                f"saved with works, {anew}."
            )


def _difference(path: str, subtree: str, tree: PyTree, partial: bool) -> str | None:
    """Says how the arrays under `subtree` of a checkpoint differ from those of `tree`, `None` if they do not.

    Args:
        path: The checkpoint.
        subtree: Where its arrays lie.
        tree: A tree of arrays or their shapes.
        partial: Whether the checkpoint may lack some of them.
    """
    under = subtree + "/"
    stored = {name: array.shape for name, array in stored_arrays(path).items() if name.startswith(under)}
    here = _shapes(subtree, tree)
    for name in sorted(here):
        if name not in stored and not partial:
            return f"which lacks {name}"
        if stored.get(name, here[name]) != here[name]:
            return f"where {name} has the shape {list(stored[name])} and here {list(here[name])}"
    besides = sorted(stored.keys() - here.keys())
    return f"which holds {besides[0]} besides" if besides else None


def _shapes(subtree: str, tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of `tree` by their paths in a checkpoint."""
    names = jax.tree.leaves(leaf_key_paths(tree, subtree.replace("/", "."), is_leaf=is_named_array))
    leaves = jax.tree.leaves(tree, is_leaf=is_named_array)
    arrays = [x.array if is_named_array(x) else x for x in leaves]
    found = zip(names, arrays, strict=True)
    return {name.replace(".", "/"): x.shape for name, x in found if hasattr(x, "shape")}
