"""One run on many processes, as torchrun starts them, by torch's own engine: DDP and FSDP2.

All of it is applied to a model from outside. A process works on its share of each batch; batch,
order of pictures, augmentation and learning rate are the same on any number of processes.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vitlab.models import zoo

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """The first process writes and talks."""
        return self.rank == 0


ALONE = Ranks()


class Followed(Exception):  # noqa: N818  the first process has said what is wrong
    """The first process failed, and this one ends with it."""


@contextmanager
def processes() -> Iterator[Ranks]:
    """Join the processes that torchrun started; without it, this one is alone."""
    if "RANK" not in os.environ or dist.is_initialized():
        yield current()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(rendezvous("env://"))
    # Processes that torchrun starts again must not find the addresses of those that died.
    store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield current()
        # A thread of gloo's frees the tensors of the last message, for which it needs the
        # interpreter; where this one has begun to exit by then, torch aborts the process.
        time.sleep(0.1)
    finally:
        dist.destroy_process_group()


def current() -> Ranks:
    """Where this process stands."""
    return Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE


@contextmanager
def lost(ranks: Ranks) -> Iterator[None]:
    """The end of another process, as one line instead of torch's."""
    try:
        yield
    except RuntimeError as e:
        broken = isinstance(e, dist.DistError) or "gloo" in str(e) or "Connection" in str(e)
        if ranks.world == 1 or not broken:
            raise
        raise OSError(
            f"process {ranks.rank}: another process of this run has ended (what it said comes"
            " before this); the same command resumes"
        ) from e


# What processes tell each other ------------------------------------------------------------------


def first_says(ranks: Ranks, ask: Callable[[], T]) -> T:
    """What the first process finds, on all of them; where it fails, they end too."""
    if ranks.world == 1:
        return ask()
    answer: list[Any] = [None, "not asked"]
    error: Exception | None = None
    if ranks.first:
        try:
            answer = [ask(), None]
        except Exception as e:
            answer, error = [None, str(e)], e
    dist.broadcast_object_list(answer)
    if error:
        raise error
    if answer[1] is not None:
        raise Followed(answer[1])
    found: T = answer[0]
    return found


def total(ranks: Ranks, *values: float) -> list[float]:
    """Each value summed over the processes."""
    if ranks.world == 1:
        return list(values)
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return summed.tolist()


def gather(ranks: Ranks, value: T) -> list[T]:
    """The value of every process, in order, on all of them."""
    if ranks.world == 1:
        return [value]
    found: list[Any] = [None] * ranks.world
    dist.all_gather_object(found, value)
    return found


# Models ------------------------------------------------------------------------------------------


def copy_to_all(model: nn.Module) -> nn.Module:
    """DDP: a copy on each process; gradients are averaged while they are computed."""
    device = next(model.parameters()).device
    return DistributedDataParallel(model, [device] if device.type == "cuda" else None)


def shard(model: nn.Module, device: torch.device) -> None:
    """FSDP2, in place: each process keeps a part of every tensor; blocks are gathered in turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def recompute(model: nn.Module) -> None:
    """Keep only what enters each block, in place; the backward pass computes the rest again."""
    for block in blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: encoder blocks, or a BiT's stages."""
    repeated = [m for m in model.children() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return [block for part in repeated for block in part]


def gathered(model: Any) -> Any:
    """The trained model as anybody uses it: whole, on the CPU, float32, in evaluation mode."""
    plain = zoo.build(model.config)
    plain.load_state_dict({k: whole(v).cpu() for k, v in model.state_dict().items()})
    return plain.eval()


def syncing(forward: Any, now: bool) -> AbstractContextManager[Any]:
    """Around the parts of an accumulated batch: gradients travel with the last part only."""
    if isinstance(forward, DistributedDataParallel) and not now:
        return forward.no_sync()
    if hasattr(forward, "set_requires_gradient_sync"):
        forward.set_requires_gradient_sync(now)
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A tensor of a sharded model, gathered; any other as it is. All processes must take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, laid out as `target` is: this process's part of it, where that is sharded."""
    if not isinstance(target, DTensor) or isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.to(target.device)
    return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
