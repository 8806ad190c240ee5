"""Places host batches on a mesh as `jax.Array`s; makes meshes; says which rows a process reads.

This is the only file of the data path that imports jax, and only if a mesh is used.

A global batch has B rows of T slots, in A micro-batches. Every column is Int32[B, T] and gets the
same PartitionSpec; with gradient accumulation it is Int32[A, B/A, T], and the leading axis is not
divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from easypipe.core.errors import PlacementError, naming_extra, require_known
from easypipe.core.values import Batch, Columns, Int32, Int64
from easypipe.loader.collate import as_stack
from easypipe.loader.config import axes_in_words, check_axes

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

# Without a partition_spec a batch is split over these mesh axes, and its rows over SLOT_AXIS.
BATCH_AXES = ("data", "fsdp")
SLOT_AXIS = "sequence"


def make_mesh(mesh: Any) -> Mesh:
    """Returns a jax Mesh over all devices of all processes.

    Axes are of type Auto, so that a jitted step may gather from sharded arrays.

    Args:
        mesh: A jax Mesh, which is returned unchanged, or `{axis: size}`; one size may be -1, which
            means all remaining devices.

    Raises:
        PlacementError: The sizes do not fit the number of devices.
    """
    with naming_extra():
        import jax
        from jax.sharding import AxisType, Mesh

    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, Mapping):
        raise PlacementError(
            at="mesh",
            problem=f"expected a jax Mesh or {{axis: size}}, got {mesh!r}",
            fix="Write {'data': -1}.",
        )
    sizes = check_axes(mesh)
    count = jax.device_count()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if count % fixed:
            raise PlacementError(
                at="mesh",
                problem=f"{axes_in_words(sizes)}: the fixed axes take {fixed} devices, which does "
                f"not divide the {count} there are",
                fix=f"Choose sizes whose product divides {count}.",
            )
        sizes = {axis: count // fixed if size == -1 else size for axis, size in sizes.items()}
    elif fixed != count:
        raise PlacementError(
            at="mesh",
            problem=f"{axes_in_words(sizes)} is {fixed} devices, there are {count}",
            fix="Set one axis to -1 to have it take what is left, or give a jax Mesh over some of "
            "the devices.",
        )
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def local_mesh() -> Mesh:
    """Returns a mesh with one axis, `data`, over this process's devices."""
    import jax
    from jax.sharding import AxisType

    devices = jax.local_devices()
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def on_default_device(batch: Columns) -> Batch:
    """Returns the batch with its NumPy arrays as jax.Arrays on the default device."""
    import jax

    return {
        name: jax.device_put(values) if isinstance(values, np.ndarray) else values
        for name, values in batch.items()
    }


def gather_bytes(own: bytes) -> list[bytes]:
    """Returns the bytes of every process, in order; all must have the same length.

    It is collective: every process must call it at the same point of its program.
    """
    import jax
    from jax.experimental.multihost_utils import process_allgather

    if jax.process_count() == 1:
        return [own]
    gathered = np.asarray(process_allgather(np.frombuffer(own, np.uint8)))
    return [row.tobytes() for row in gathered.reshape(jax.process_count(), len(own))]


class Placement:
    """The placement of batches on a mesh, and the rows that this process must read.

    Args:
        mesh: As for `make_mesh`.
        partition_spec: A PartitionSpec or its form in YAML (`[["data", "fsdp"], null]`): first the
            axes of the batch, then those of the slots. None divides the batch over the axes `data`
            and `fsdp`, as far as the mesh has them, and the slots over `sequence`.
        batch_size: The rows of a global batch.
        fixed_width: Whether all batches have one shape, so that compiling a program for it pays.
        accumulation_steps: A, which divides `batch_size`; the spec is that of one micro-batch.

    Raises:
        PlacementError: An axis is unknown, or the batch does not divide.
    """

    def __init__(
        self,
        mesh: Any,
        partition_spec: Any,
        batch_size: int,
        *,
        fixed_width: bool = False,
        accumulation_steps: int = 1,
    ) -> None:
        self.mesh = make_mesh(mesh)
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        self.partition_spec = _partition_spec(partition_spec, self.mesh)
        self.batch_size = batch_size
        self._leading = () if accumulation_steps == 1 else (accumulation_steps,)
        self._micro_size = batch_size // accumulation_steps
        self.sharding = NamedSharding(
            self.mesh, PartitionSpec(*(None for _ in self._leading), *self.partition_spec)
        )
        ways, self._slot_ways = self._ways(0), self._ways(1)
        if self._micro_size % ways:
            unit = ways * accumulation_steps
            below = batch_size // unit * unit
            each = f" in {accumulation_steps} micro-batches" if self._leading else ""
            raise PlacementError(
                at="batch_size",
                problem=f"{batch_size} rows{each} do not divide over {self._named(0)} = {ways} "
                "ways",
                fix=f"Set batch_size to {f'{below} or {below + unit}' if below else unit}, or "
                "change the mesh.",
            )
        if not self.sharding.addressable_devices:
            raise PlacementError(
                at="mesh",
                problem="no device of this process is in it",
                fix="Make the mesh over devices of every process.",
            )
        self._micro_rows = self._local_rows()
        # The batch's rows that this process reads, micro-batch by micro-batch.
        self.local_rows = np.concatenate(
            [a * self._micro_size + self._micro_rows for a in range(accumulation_steps)]
        )
        # whether this process reads all rows, in order
        self.whole = len(self.local_rows) == batch_size and accumulation_steps == 1
        # Columns are transferred as one array and split on the devices: a call of a compiled
        # program costs the interpreter a fraction of four device_puts. This is not done with
        # several processes, because their threads would launch the program in different orders.
        whole = NamedSharding(self.mesh, PartitionSpec(None, *self.sharding.spec))
        one_program = fixed_width and self.sharding.is_fully_addressable
        self._part = (
            jax.jit(tuple, in_shardings=whole, out_shardings=self.sharding) if one_program else None
        )

    def place(self, batch: Columns | Sequence[Int32]) -> Batch:
        """Places the columns of this process's rows.

        Args:
            batch: `local_rows`, in that order, all slots of each; with micro-batches [A, rows, T].

        Returns:
            `{column: jax.Array[B, T]}`, with micro-batches jax.Array[A, B/A, T].

        Raises:
            PlacementError: Slots do not divide over the mesh, a column does not hold numbers, or it
                is not [rows, slots] and the mesh has several processes.
        """
        if not isinstance(batch, Mapping):  # a user's collator, or rows that are tuples
            named = {f"{i}": column for i, column in enumerate(batch)}
            placed = self.place(named)
            return tuple(placed[name] for name in named)  # pyright: ignore[reportReturnType]
        for name, column in batch.items():
            if getattr(column, "dtype", np.dtype(object)).kind in "OSU":
                raise PlacementError(
                    at=f"batch, column {name!r}",
                    problem="it does not hold numbers, so it cannot be put on a device",
                    fix="Leave the column out, or leave prefetch_to_device and mesh out.",
                )
        num_slots = next(iter(batch.values())).shape[-1]  # the tokens are the first column
        if num_slots % self._slot_ways:
            raise self._uneven_slots(num_slots)
        if self._part is not None and (stack := as_stack(batch)) is not None:
            return dict(zip(batch, self._part(stack), strict=True))
        import jax

        if self.sharding.is_fully_addressable:
            return jax.device_put(dict(batch), self.sharding)
        slots = len(self._leading) + 1  # the axis of the slots
        if any(values.shape[slots : slots + 1] != (num_slots,) for values in batch.values()):
            raise PlacementError(
                at="mesh",
                problem="columns that are not [rows, slots], such as images, on a mesh of several "
                "processes",
                fix="Leave mesh out, and let every process read its own rows: "
                "loader.of_rank(process_index, process_count).",
            )
        shape = (*self._leading, self._micro_size, num_slots)
        pieces, devices, names = [], [], list(batch)
        for device, index in self.sharding.addressable_devices_indices_map(shape).items():
            assert index is not None, "a sharding indexes every dimension"
            rows, columns = index[-2:]
            start, stop, _ = rows.indices(self._micro_size)
            first = int(np.searchsorted(self._micro_rows, start))
            for name in names:
                here = batch[name][(*index[:-2], slice(first, first + stop - start), columns)]
                pieces.append(here)
                devices.append(device)
        put = jax.device_put(pieces, devices)
        return {
            name: jax.make_array_from_single_device_arrays(
                (*shape, *batch[name].shape[slots + 1 :]), self.sharding, put[i :: len(names)]
            )
            for i, name in enumerate(names)
        }

    def _local_rows(self) -> Int64:
        """Returns the rows of a micro-batch that are on a device of this process, ascending."""
        mine = np.zeros(self._micro_size, dtype=bool)
        # the fewest slots that divide evenly; rows do not depend on their number
        shape = (*self._leading, self._micro_size, self._slot_ways)
        for index in self.sharding.addressable_devices_indices_map(shape).values():
            assert index is not None, "a sharding indexes every dimension"
            mine[index[-2]] = True
        return np.flatnonzero(mine)

    def _uneven_slots(self, num_slots: int) -> PlacementError:
        return PlacementError(
            at="partition_spec",
            problem=f"rows of {num_slots} slots do not divide over {self._named(1)} = "
            f"{self._slot_ways} ways",
            fix=f"Choose a row length that {self._slot_ways} divides, or split only the batch.",
        )

    def _axes_of(self, dimension: int) -> tuple[str, ...]:
        entries = tuple(self.partition_spec)
        entry = entries[dimension] if dimension < len(entries) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

    def _ways(self, dimension: int) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self._axes_of(dimension))

    def _named(self, dimension: int) -> str:
        return " x ".join(f"{axis}={self.mesh.shape[axis]}" for axis in self._axes_of(dimension))


def _partition_spec(spec: Any, mesh: Mesh) -> PartitionSpec:
    """Returns the PartitionSpec of batches, from a PartitionSpec or its form in YAML.

    Raises:
        PlacementError: It is not a PartitionSpec, has too many entries, or names an axis twice or
            one that the mesh lacks.
    """
    from jax.sharding import PartitionSpec

    if spec is None:
        axes = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)
        if mesh.shape.get(SLOT_AXIS, 1) > 1:
            return PartitionSpec(axes or None, SLOT_AXIS)
        return PartitionSpec(axes) if axes else PartitionSpec()
    if isinstance(spec, str):
        spec = (spec,)
    if not isinstance(spec, PartitionSpec):
        if not isinstance(spec, Sequence):
            raise PlacementError(
                at="partition_spec",
                problem=f"expected a PartitionSpec or a list, got {spec!r}",
                fix="Write ['data'].",
            )
        spec = PartitionSpec(
            *(tuple(entry) if isinstance(entry, list) else entry for entry in spec)
        )
    if len(spec) > 2:
        raise PlacementError(
            at="partition_spec",
            problem=f"{spec} has {len(spec)} entries, batches have 2 dimensions: rows and slots",
        )
    seen: set[str] = set()
    for entry in spec:
        for axis in () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry):
            problem = f"the mesh has no axis {axis!r}"
            require_known(axis, mesh.axis_names, "partition_spec", problem, kind=PlacementError)
            if axis in seen:
                raise PlacementError(
                    at="partition_spec",
                    problem=f"axis {axis!r} appears twice",
                    fix="Use each axis once.",
                )
            seen.add(axis)
    return spec
