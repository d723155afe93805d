"""`haliax.nn.Embedding` lookups that XLA can partition on a mesh that is partly manual."""

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager

import haliax.nn as hnn
import jax
from haliax import NamedArray
from haliax.partitioning import ResourceMapping
from jax.sharding import PartitionSpec
from levanter.trainer import TrainerConfig


@contextmanager
def gathered_lookups(config: TrainerConfig, manual: str) -> Generator[None]:
    """Lets `haliax.nn.Embedding` gather its table over the data axes by itself while a step is traced.

    Where a mesh is manual over one axis and has two more of several devices, XLA's partitioner
    aborts the process on a lookup whose table and indices are both sharded (FSDP). So there the lookup is
    written out: gather the table, look up this device's rows; the gradient is scattered back. A mesh
    with fewer axes keeps the host's own lookup.

    Args:
        config: The options of the trainer whose step it is.
        manual: The mesh axis that is manual.
    """
    host_embed, Batch = hnn.Embedding.embed, str(config.batch_axis_name)
    inside = [name for name, size in config.device_mesh.shape.items() if name != manual and size > 1]
    batch_axes = config.compute_axis_mapping[Batch]
    data_axes = tuple(name for name in inside if name in batch_axes)
    if len(inside) < 2 or not data_axes:
        yield
        return

    def embed(self: hnn.Embedding, input_ids: NamedArray) -> NamedArray:
        if Batch not in input_ids.axis_names:
            return host_embed(self, input_ids)

        def local_rows(weight: NamedArray, ids: NamedArray) -> NamedArray:
            array = weight.array
            for position, axes in enumerate(table_spec):
                if axes is not None:
                    array = jax.lax.all_gather(array, axes, axis=position, tiled=True)
            whole = dataclasses.replace(self, weight=NamedArray(array, weight.axis_names))
            return host_embed(whole, ids).rearrange((Batch, ...))

        table_spec = _spec_over(data_axes, self.weight, config.parameter_axis_mapping)
        rows_spec = _spec_over(data_axes, input_ids, {Batch: data_axes})
        lookup = jax.shard_map(
            local_rows,
            in_specs=(table_spec, rows_spec),
            out_specs=PartitionSpec(data_axes),
            axis_names=set(data_axes),
            check_vma=False,  # the checker does not follow a gather's gradient
        )
        return lookup(self.weight, input_ids)

    hnn.Embedding.embed = embed  # pyrefly: ignore[bad-assignment]  the host's decorator hides its type
    try:
        yield
    finally:
        hnn.Embedding.embed = host_embed


def _spec_over(mesh_axes: tuple[str, ...], x: NamedArray, mapping: ResourceMapping) -> PartitionSpec:
    """The sharding of `x` over `mesh_axes` alone."""

    def entry(name: str) -> tuple[str, ...] | None:
        axes = mapping.get(name, ())
        kept = tuple(axis for axis in ([axes] if isinstance(axes, str) else axes) if axis in mesh_axes)
        return kept or None

    return PartitionSpec(*(entry(name) for name in x.axis_names))
