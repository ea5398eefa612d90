"""Parameters and batches spread over the devices of one host."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from learner_service.workload import MeshLayout, WorkloadError

MESH_AXIS = "fsdp"


def fsdp_layout(device_count: int) -> MeshLayout | None:
    """Splits each tensor's longest divisible axis, and each batch's first axis, over local devices.

    Args:
        device_count: `workload.options.fsdp_device_count`; 0 asks for no mesh. Tensors of which no axis is a
            multiple of it are replicated.

    Raises:
        WorkloadError: this process has fewer devices.
    """
    if not device_count:
        return None
    devices = jax.local_devices()
    if len(devices) < device_count:
        raise WorkloadError(
            f"workload.options.fsdp_device_count = {device_count}, but this process has {len(devices)} device(s); "
            f"set it to at most {len(devices)}, or to 0 for one device and no mesh."
        )
    mesh = jax.make_mesh((device_count,), (MESH_AXIS,), devices=devices[:device_count], axis_types=(AxisType.Auto,))

    def sharding(name: str, shape: tuple[int, ...]) -> NamedSharding:
        del name
        divisible = [axis for axis, size in enumerate(shape) if size and size % device_count == 0]
        if not divisible:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(divisible, key=lambda axis: shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, MESH_AXIS))

    return MeshLayout(mesh, sharding, NamedSharding(mesh, PartitionSpec(MESH_AXIS)))
