"""Bytes of all tensors of a process, counted as they come and go; the same for real tensors and for fake ones."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

ALLOCATED = 512
"""Bytes to which CUDA's allocator rounds every tensor up."""


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of all tensors that exist, and of the most that existed. Use `counting` as a context.

    A tensor counts from its creation, or from the first operation that reads it; one that is read without having been
    created in the context existed all the time, such as DDP's buckets, which Python does not see.

    Args:
        unit: bytes to which every tensor is rounded up.
    """

    def __init__(self, unit: int = ALLOCATED) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._unit = unit
        self._sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: else torch runs nothing compiled here, and the step would need the memory of an eager one."""
        return True

    def add(self, tensor: Tensor) -> int:
        """Count a tensor, if its storage is not counted yet; return the bytes added."""
        storage = tensor.untyped_storage()
        if storage in self._sizes:
            return 0
        size = [self._rounded(storage.nbytes())]
        self._sizes[storage] = size
        self._grow(size[0])
        weakref.finalize(storage, lambda: self._grow(-size[0]))
        return size[0]

    def add_existing(self) -> None:
        """Count every tensor that Python can reach. The objects that gc.freeze exempted are collected again after it."""
        gc.collect()
        gc.unfreeze()  # frozen objects are not listed
        for one in gc.get_objects():
            if issubclass(type(one), Tensor) and _has_bytes(one):
                self.add(one)

    def _find(self, tensor: Tensor) -> None:
        """Count a tensor that has existed all the time, if it is not counted yet."""
        most = self.most
        self.most = most + self.add(tensor)

    def _grow(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def forget(self) -> None:
        """Count the most from now on."""
        self.most = self.now

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this context, and notice storages that are resized, which is how FSDP2 frees gathered weights."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, num_bytes: int) -> None:
            resize(storage, num_bytes)
            if storage in self._sizes:
                size = self._sizes[storage]
                self._grow(self._rounded(num_bytes) - size[0])
                size[0] = self._rounded(num_bytes)

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # its local part comes here by itself
        kwargs = kwargs or {}
        for tensor in _tensors_in((args, kwargs)):
            self._find(tensor)
        output = function(*args, **kwargs)
        for tensor in _tensors_in((output,)):
            self.add(tensor)
        return output

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._unit) * self._unit


class RehearsedBytes(LiveBytes):
    """Counter of what a GPU would hold too, on CPU processes: without the copy that gloo makes to scatter a sum."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "aten" and _is_inside(SCATTERING):
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)


SCATTERING = ("reduce_scatter_single", "reduce_scatter_tensor")
"""Names of torch's function, in 2.13 and before."""


def _is_inside(names: tuple[str, ...]) -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors with bytes in the arguments or results of an operation; several times as fast as torch's pytrees."""
    for value in values:
        if isinstance(value, Tensor):
            if _has_bytes(value):
                yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())


def _has_bytes(tensor: Tensor) -> bool:
    is_meta = tensor.device.type == "meta"  # `is_meta` of a fake tensor is slow
    return tensor.layout == torch.strided and not is_meta and not is_traceable_wrapper_subclass(tensor)
