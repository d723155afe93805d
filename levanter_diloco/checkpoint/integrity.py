"""Checksums of every array of a checkpoint: taken on the devices for a save, compared with what can be read of it.

The store itself has checksums of its index alone; a wrong bit in an array passes it unseen.
"""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path
from jaxtyping import PyTree, UInt32
from levanter.checkpoint_manifest import CheckpointArray, read_manifest
from levanter.tensorstore_serialization import _create_ocdbt_spec, _flatten_serializable_leaves
from pydantic import ValidationError

from ..errors import DamagedCheckpoint
from .checksum import device_sums, sum_on_host
from .label import LABEL, Label

CHECKSUMS = "checksums"
"""The array of a checkpoint with one row for each device and one column for each other array."""


def with_checksums(state: PyTree, mesh: Mesh) -> dict[str, PyTree]:
    """Returns the fields of `state` by name, and the checksums of all arrays in them.

    Row d of the checksums is what device d of the mesh adds up, so that nothing crosses between islands; their sum
    counts. Columns go by the arrays' names in a checkpoint, sorted.
    """
    names, arrays = _flatten_serializable_leaves(state)
    by_name = [array for _, array in sorted(zip(names, arrays, strict=True), key=lambda item: item[0])]
    rows = [device_sums(array, mesh) for array in by_name]
    # All sums are on their way before the first is fetched.
    own = [{shard.index[0].start or 0: shard.data for shard in row.addressable_shards} for row in rows]
    fetched = jax.device_get(own)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        device = index[0].start or 0 if index else 0
        return np.stack([column[device] for column in fetched], axis=1)

    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.size, len(rows))
    # A dict: the checksums join the state's fields without a field of their own in it.
    fields = {path[0].name: x for path, x in tree_leaves_with_path(state, is_leaf=lambda x: x is not state)}
    return {**fields, CHECKSUMS: jax.make_array_from_callback(shape, where, part, dtype=jnp.uint32)}


def check(path: str) -> dict[str, int] | None:
    """Reads all of the checkpoint at `path` and returns each array's checksum; None if none were saved with it.

    Every process reads its share, a chunk at a time, and all come to the same verdict.

    Raises:
        DamagedCheckpoint: If something cannot be read, or is not what was saved.
    """
    fault, names, saved, sums = None, [], np.zeros(0, np.uint32), np.zeros(0, np.uint32)
    try:
        if (arrays := _checked_arrays(path)) is not None:
            names = sorted(arrays.keys() - {CHECKSUMS})
            saved = read_array(path, CHECKSUMS).sum(axis=0, dtype=np.uint32)
            sums = _sums(path, [arrays[name] for name in names])
    except (OSError, ValueError) as error:
        fault = _reason(error)
    # All come to the same verdict: a process that went on alone would hang in the next collective.
    if jax.process_count() > 1:
        faults = process_allgather(np.asarray(fault is not None))
        if fault is None and faults.any():
            fault = f"process {faults.argmax()} cannot read it, as its log says"
        elif fault is None:
            sums = process_allgather(sums).sum(axis=0, dtype=np.uint32)
    if fault is None and saved.size != sums.size:
        fault = f"manifest.json lists {sums.size} arrays, and {saved.size} have a checksum"
    if fault is None and (wrong := [name for name, a, b in zip(names, saved, sums, strict=True) if a != b]):
        fault = f"{_some(wrong)} differ{'s' * (len(wrong) == 1)} from the checksum saved along"
    if fault is not None:
        raise DamagedCheckpoint(path, fault)
    return {name: int(value) for name, value in zip(names, sums, strict=True)} or None


def checksum_of(checksums: Mapping[str, int], part: str) -> str:
    """One checksum for all arrays of a part, such as `model`, in hexadecimal."""
    lines = [f"{name} {value}" for name, value in sorted(checksums.items()) if name.partition("/")[0] == part]
    return f"{zlib.crc32('\n'.join(lines).encode()):08x}"


def _checked_arrays(path: str) -> dict[str, CheckpointArray] | None:
    """What the manifest lists, with the checksums among it; None if the checkpoint is not one of this package's."""
    label, arrays = Label.read(path), stored_arrays(path)
    if label is None and CHECKSUMS in arrays:
        raise ValueError(f"{LABEL} is missing")
    if label is not None and CHECKSUMS not in arrays:
        raise ValueError(f"manifest.json is missing, or lists no {CHECKSUMS}")
    return arrays if label is not None else None


def stored_arrays(path: str) -> dict[str, CheckpointArray]:
    """What the manifest of the checkpoint at `path` lists, by name; nothing without one, as in old ones of the host.

    Raises:
        OSError, ValueError: If it cannot be read.
    """
    try:
        manifest = read_manifest(path)
    except ValidationError as error:
        raise ValueError(f"manifest.json is not as it was written: {error.errors()[0]['msg']}") from error
    return {} if manifest is None else {array.path: array for array in manifest.arrays}


def read_array(path: str, name: str) -> np.ndarray:
    """The array `name` of the checkpoint at `path`."""
    return np.asarray(_open(path, stored_arrays(path)[name]).read().result())


def _open(path: str, array: CheckpointArray) -> tensorstore.TensorStore:
    store = tensorstore.open(_create_ocdbt_spec(path, array.path), open=True, read=True).result()
    found = (tuple(store.shape), store.dtype.name)
    if found != (array.shape, array.dtype):
        raise ValueError(f"manifest.json says {array.dtype}{array.shape} of {array.path}, and it is {found}")
    return store


def _sums(path: str, arrays: Sequence[CheckpointArray]) -> UInt32[np.ndarray, " n"]:
    """The checksum of each array, as far as its chunks are this process's share."""
    stores = [_open(path, array) for array in arrays]
    chunks = [(column, index) for column, store in enumerate(stores) for index in _chunks(store)]

    def sum_of(chunk: tuple[int, tuple[slice, ...]]) -> tuple[int, np.uint32]:
        column, index = chunk
        store = stores[column]
        values = np.asarray(store[index].read().result())
        return column, sum_on_host(values, [own.start for own in index], store.shape)

    sums = np.zeros(len(arrays), np.uint32)
    # Dealt in turn, so that every process reads about as much, whatever the arrays' sizes.
    own = chunks[jax.process_index() :: jax.process_count()]
    # Reading and hashing release the interpreter; four keep a disk and two cores busy.
    with ThreadPoolExecutor(4) as pool:
        for column, value in pool.map(sum_of, own):
            sums[column : column + 1] += value  # of one element: a scalar would warn of wrapping around
    return sums


def _chunks(store: tensorstore.TensorStore) -> Iterator[tuple[slice, ...]]:
    """Where the chunks of an array lie in it."""
    sizes = [n or 1 for n in store.chunk_layout.read_chunk.shape or ()]  # None for a scalar
    ends = zip(sizes, store.shape, strict=True)
    return itertools.product(*([slice(a, min(a + n, end)) for a in range(0, end, n)] for n, end in ends))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reason(error: Exception) -> str:
    """What went wrong, without the store's own source lines and specification."""
    return " ".join(str(error).partition(" [source locations")[0].partition(" [tensorstore_spec")[0].split())
