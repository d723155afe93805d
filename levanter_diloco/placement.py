"""Where every array of the training state lies: on which devices, and in which memory."""

from dataclasses import dataclass

from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.util import is_named_array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, tree_leaves_with_path
from jaxtyping import PyTree
from levanter.trainer_state import trainables_only

from .config import OuterMemory
from .cut import share_spec
from .errors import option_error
from .outer import ISLAND
from .state import DiLoCoState

MODEL, OPT_STATE, CROSSED, ISLANDS = map(GetAttrKey, ("model", "opt_state", "crossed", "islands"))


@dataclass(frozen=True)
class Placement:
    """The canonical sharding of every array of a state: programs return them so, or the next would compile anew."""

    mesh: Mesh
    mapping: ResourceMapping
    """Logical to mesh axes, `diloco` included."""

    outer_memory: OuterMemory = "device"

    @property
    def sharded(self) -> bool:
        """Whether the outer optimizer's state is spread over the slots of the islands."""
        return self.outer_memory == "sharded"

    def check(self) -> None:
        """Refuses a memory that the devices do not have.

        Raises:
            OptionError: If it is lacking.
        """
        kinds = {memory.kind for memory in self.mesh.devices.flat[0].addressable_memories()}
        if self.outer_memory not in {*kinds, "sharded"}:
            rule = f"be a memory of the devices, which have {', '.join(sorted(kinds))}"
            raise option_error("outer_memory", self.outer_memory, rule, "device")

    def shardings(self, state: DiLoCoState) -> list[NamedSharding]:
        """Returns the sharding of every array of `state`, in flattening order.

        Named arrays go by their axes. Of the others, those of the islands lead with the island axis and lie on
        their island; counts and keys of the whole run are everywhere. Theta and the named arrays of the outer
        optimizer's state lie in `pinned_host` memory if it is asked for. All else is in device memory, frozen leaves
        too: each step reads them. With `sharded`, each slot of the islands has its share of the outer optimizer's
        state and of what has crossed.
        """
        trainable = tree_leaves_with_path(trainables_only(state.model, state.is_trainable), is_leaf=is_named_array)
        theta = {(MODEL, *path) for path, _ in trainable}

        def sharding(path: tuple, x: PyTree) -> NamedSharding:
            if not is_named_array(x):
                return self._on("device", PartitionSpec(*([ISLAND] if path[0] == ISLANDS else [])))
            if self.sharded and path[0] in (OPT_STATE, CROSSED):
                return self._on("device", share_spec(x.axes, self.mesh, self.mapping))
            hosted = self.outer_memory == "pinned_host" and (path[0] == OPT_STATE or path in theta)
            return self._on("pinned_host" if hosted else "device", pspec_for_axis(x.axis_names, self.mapping))

        return [sharding(*item) for item in tree_leaves_with_path(state, is_leaf=is_named_array)]

    def _on(self, memory: str, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec, memory_kind=memory)
