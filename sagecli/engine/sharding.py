"""Parameters split over the processes (FSDP2): each keeps a part of every tensor and gathers a block when it runs.

The sum of the processes' gradients, not their mean, is what an update needs: each process's loss is its share of one.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: Any, computed: torch.dtype, device: torch.device) -> None:
    """Split a transformer's parameters, block by block; computed: the dtype that blocks are gathered and run in."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # The transformers write into no output of theirs; sums equal to those of one process prove it (tests).
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    kinds = set(module._repeated_blocks)  # as diffusers' transformers state them
    mixed = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy: dict[str, Any] = {} if computed == torch.float32 else {"mp_policy": mixed}
    for part in module.modules():
        if type(part).__name__ in kinds:
            fully_shard(part, mesh=mesh, **policy)
    fully_shard(
        module, mesh=mesh, reshard_after_forward=True
    )  # else a remembered policy would not reach the outer part
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other


def own_part(tensor: Tensor) -> Tensor:
    """What this process keeps of a tensor, in the same memory, without gradient; all of it where it is not split."""
    found: Tensor = tensor.to_local() if isinstance(tensor := tensor.detach(), DTensor) else tensor
    return found


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """The tensor whose own part is `part`, split as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def part_of(value: Tensor, tensor: Tensor) -> Tensor:
    """A whole value, which all processes have, split as the tensor is."""
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered where it is split; every process calls it."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found
