"""The placement of the training state: on which devices every array lies, and in which memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.util import is_named_array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, tree_leaves_with_path
from jaxtyping import Array, PyTree

from ..axes import ISLAND, Params
from ..errors import option_error
from ..options.config import OuterMemory
from .buckets import buckets_of, put_all, share_axis, share_spec
from .state import DiLoCoState

MODEL, OPT_STATE, CROSSED, ISLANDS = map(GetAttrKey, ("model", "opt_state", "crossed", "islands"))

VECTORS = 512
"""Fewer rows of a matrix are a stack of vectors, one a layer."""


@dataclass(frozen=True)
class Placement:
    """The canonical sharding of every array of a state: programs return them so, or the next would compile anew."""

    mesh: Mesh
    mapping: ResourceMapping
    """Logical to mesh axes, `diloco` included."""

    outer_memory: OuterMemory = "device"

    @property
    def sharded(self) -> bool:
        """Whether every slot of the islands steps its share of the outer parameters, with its share of the state."""
        return self.outer_memory == "sharded"

    def check(self) -> None:
        """Refuses a memory that the devices do not have, and shares where one slot has everything.

        Raises:
            OptionError: If it is so.
        """
        kinds = {memory.kind for memory in self.mesh.devices.flat[0].addressable_memories()}
        if not self.sharded and self.outer_memory not in kinds:
            rule = f"be a memory of the devices, which have {', '.join(sorted(kinds))}"
            raise option_error("outer_memory", self.outer_memory, rule, "device")
        if self.sharded and self.mesh.shape[ISLAND] == 1:
            rule = "find islands on devices of their own, and here all share theirs"
            raise option_error("outer_memory", self.outer_memory, rule, "device")

    def shardings(self, state: DiLoCoState) -> list[NamedSharding]:
        """Returns the sharding of every array of `state`, in flattening order.

        Named arrays go by their axes. Of the others, those of the islands lead with the island axis and lie on
        their island; counts and keys of the whole run are everywhere. Theta and the named arrays of the outer
        optimizer's state lie in `pinned_host` memory if it is asked for and they fit. All else is in device memory,
        frozen leaves too: each step reads them. With `sharded`, each slot of the islands has its share of the outer
        optimizer's state and of what has crossed; an array of which no axis can be split is whole.

        Raises:
            OptionError: If that is the largest one.
        """
        if self.sharded:
            self._check_shares(state.opt_state)
        # Theta by its paths: frozen leaves of the same model stay on the devices.
        trainable = tree_leaves_with_path(state.theta, is_leaf=is_named_array)
        theta = {(MODEL, *path) for path, _ in trainable}

        def sharding(path: tuple, x: PyTree) -> NamedSharding:
            if not is_named_array(x):
                return self._on("device", PartitionSpec(*([ISLAND] if path[0] == ISLANDS else [])))
            if self.sharded and path[0] in (OPT_STATE, CROSSED):
                return self._on("device", self._share(x.axes))
            outer = path[0] == OPT_STATE or path in theta
            return self._on("pinned_host" if outer and self._fits_host(x.axes) else "device", self._all(x.axes))

        return [sharding(*item) for item in tree_leaves_with_path(state, is_leaf=is_named_array)]

    def own(self, outer: Params) -> Params:
        """Returns what a slot of the islands steps of a fragment of outer parameters: its share, or all of it."""

        def own(shards: list[Array], leaves: list[tuple[Axis, ...]]) -> list[Array]:
            slot, slots = jax.lax.axis_index(ISLAND), self.mesh.shape[ISLAND]
            axes = [share_axis(leaf, self.mesh, self.mapping) for leaf in leaves]
            sizes = [x.shape[axis or 0] // slots for x, axis in zip(shards, axes, strict=True)]
            return [
                x if axis is None else jax.lax.dynamic_slice_in_dim(x, slot * size, size, axis)
                for x, axis, size in zip(shards, axes, sizes, strict=True)
            ]

        return self._mapped(own, outer, self._all, self._share) if self.sharded else outer

    def whole(self, outer: Params) -> Params:
        """Returns all of a fragment of which every slot has its share, the inverse of `own`; a share crosses once."""

        def whole(shards: list[Array], leaves: list[tuple[Axis, ...]]) -> list[Array]:
            out = shards = [x[None] for x in shards]
            for bucket in buckets_of(leaves, self.mesh, self.mapping, num_pieces=1, sharded=True):
                if bucket.num_shares > 1:
                    # Every slot's share crosses once, in f32: what an all-reduce would have sent as its second half.
                    gathered = jax.lax.all_gather(bucket.share.take(shards, 0), ISLAND, axis=1, tiled=True)
                    out = put_all([bucket], out, 0, [gathered])
            return [x[0] for x in out]

        return self._mapped(whole, outer, self._share, self._all) if self.sharded else outer

    def everywhere(self, x: Array) -> Array:
        """Returns `x`, which every device has, and keeps it so.

        Else XLA would let each slot compute its islands' share of it, for that is all that a state holds there, and
        gather the shares for a report: an exchange more.
        """
        return jax.lax.with_sharding_constraint(x, self._on("device", PartitionSpec()))

    def _check_shares(self, opt_state: PyTree) -> None:
        arrays = [x for x in jax.tree.leaves(opt_state, is_leaf=is_named_array) if is_named_array(x)]
        largest = max(arrays, key=lambda x: x.size, default=None)
        if largest is not None and share_axis(largest.axes, self.mesh, self.mapping) is None:
            slots, shape = self.mesh.shape[ISLAND], {axis.name: axis.size for axis in largest.axes}
            rule = f"find an axis of the largest outer moment {shape} that {slots} slots divide on every device"
            raise option_error("outer_memory", self.outer_memory, rule, "device")

    def _fits_host(self, axes: Sequence[Axis]) -> bool:
        """Whether an array of the outer state lies in host memory.

        A TPU lays out arrays in tiles of 8 x 128, and XLA takes slices from the host where these are full: not of
        a stack of vectors, like norms, nor of a few lanes. Such arrays are small and stay on the devices.
        """
        if self.outer_memory != "pinned_host" or self.mesh.devices.flat[0].platform != "tpu":
            return self.outer_memory == "pinned_host"
        where = NamedSharding(self.mesh, self._all(axes))
        *_, rows, lanes = (1, 1, *where.shard_shape(tuple(axis.size for axis in axes)))
        full = lanes % 128 == 0 or (rows % 128 == 0 and lanes % 8 == 0)
        return full and (len(axes) > 2 or rows >= VECTORS)

    def _mapped(self, fn: Callable, outer: Params, before: Callable, after: Callable) -> Params:
        """Maps `fn` over the devices; a manual map, for a constraint would spread the sharding to what is around."""
        leaves, treedef = jax.tree.flatten(outer, is_leaf=is_named_array)
        axes = [leaf.axes for leaf in leaves]
        mapped = jax.shard_map(
            lambda arrays: fn(arrays, axes),
            mesh=self.mesh,
            in_specs=([before(own) for own in axes],),
            out_specs=[after(own) for own in axes],
            check_vma=False,  # it cannot see that the slots agree
        )
        arrays = mapped([leaf.array for leaf in leaves])
        return treedef.unflatten([NamedArray(*leaf) for leaf in zip(arrays, axes, strict=True)])

    def _all(self, axes: Sequence[Axis]) -> PartitionSpec:
        return pspec_for_axis(axes, self.mapping)

    def _share(self, axes: Sequence[Axis]) -> PartitionSpec:
        return share_spec(axes, self.mesh, self.mapping)

    def _on(self, memory: str, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec, memory_kind=memory)
