"""Shard a model's weights over the processes that learn together (FSDP2, arXiv 2304.11277).

Each process keeps a part of each weight, of its gradient and of the optimizer's state. A layer's
weights are gathered when it computes, and its gradients are added up over the processes and cut
again. The model computes what it computes in one process: only the order of sums differs. Torch
only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from torch import Tensor

if TYPE_CHECKING:  # a second of imports, which a process that learns alone does not need
    from torch.distributed.tensor import DTensor

from tasks.policy import world

Result = TypeVar("Result")


def shard(model: Any) -> None:
    """Shard a model in place, unless it is sharded or this process learns alone.

    Each of its layers is gathered alone, everything else together. Call ``run`` to compute with it.
    """
    if world.size() == 1 or is_sharded(model):
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(next(model.parameters()).device.type, (world.size(),))
    for part in [*_layers(model), model]:
        fully_shard(part, mesh=mesh)
        # Gradients are added up: each process divides its loss by the whole step's denominator.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    model.run = MethodType(_call, model)
    register_fsdp_forward_method(model, "run")


def _layers(model: Any) -> list[Any]:
    """Return the layers of a model, by the class names that transformers gives.

    Some architectures name a part of a layer, too: it is gathered with its layer.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    parts = [part for part in model.modules() if type(part).__name__ in names]
    inner = {id(below) for part in parts for below in part.modules() if below is not part}
    return [part for part in parts if id(part) not in inner]


def _call(model: Any, work: Callable[[], Result]) -> Result:
    return work()


def run(model: Any, work: Callable[[], Result]) -> Result:
    """Return ``work()``, which computes with the model: tensors that a loss may be made of.

    The weights of a sharded model are whole for the time of ``work``.
    """
    return model.run(work) if is_sharded(model) else work()


def is_sharded(model: Any) -> bool:
    """Return whether the weights of a model are sharded."""
    if world.size() == 1:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def release(model: Any) -> None:
    """Free gathered weights, which stay until a backward pass and after passes without one."""
    for part in model.modules():
        if is_sharded(part):
            part.reshard()


def _is_part(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether other processes have other parts of a tensor."""
    if world.size() == 1:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all processes. Every process must call this."""
    return tensor.full_tensor() if _is_part(tensor) else tensor


def whole_weights(model: Any) -> dict[str, Tensor] | None:
    """Return a sharded model's weights in rank 0's main memory; None for one that is not sharded.

    Every process must call this; the others get no weights. A tied weight comes once.
    """
    if not is_sharded(model):
        return None
    weights: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        gathered = whole(weight.detach())
        if world.rank() == 0:
            weights[name] = gathered.cpu()
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in tied}
    return weights | {name: value.cpu() for name, value in buffers.items()}


def like(weight: Tensor, values: Tensor) -> Tensor:
    """Return this process's part of ``values``, sharded as ``weight`` is, if it is.

    ``values`` are whole and equal in all processes.
    """
    if not _is_part(weight) or values.shape != weight.shape:
        return values
    from torch.distributed.tensor import DTensor

    local_weight = weight.to_local()
    first = world.rank() * -(-len(values) // world.size())  # parts as torch.chunk makes them
    local = values[first : first + len(local_weight)].to(local_weight.device)
    return DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor; the tensor itself if it is not sharded."""
    return tensor.to_local() if _is_part(tensor) else tensor
