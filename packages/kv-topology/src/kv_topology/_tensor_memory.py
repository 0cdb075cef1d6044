"""Find out where a tensor lies, by the interfaces that arrays have: PyTorch's methods, CUDA's and NumPy's array interface."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, final

from kv_topology._validate_layouts import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._parts import MemoryKind

__all__ = ["ArrayLike", "CudaArrayLike", "Tensor", "TensorMemory", "TorchLike", "memory_of"]

_TYPE_TEXT = re.compile(r"[<>|=][a-zA-Z](\d+)")


class TorchLike(Protocol):
    """A tensor with PyTorch's methods."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> object: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...


class ArrayLike(Protocol):
    """An array with NumPy's array interface."""

    @property
    def __array_interface__(self) -> Mapping[str, object]: ...


class CudaArrayLike(Protocol):
    """An array with CUDA's array interface, which does not name the device, so device 0 is assumed."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, object]: ...


Tensor = TorchLike | ArrayLike | CudaArrayLike


@final
class TensorMemory(NamedTuple):
    """Where a tensor lies.

    Attributes:
        address: Address of its first element.
        shape: Parts of each axis.
        strides_bytes: Distance of neighbours along each axis.
        element_bytes: Size of an element.
        kind: Where the memory lives.
        device: Number of the device.
    """

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    element_bytes: int
    kind: MemoryKind
    device: int


def memory_of(tensor: object) -> TensorMemory:
    """Return where a tensor lies.

    Raises:
        InvalidGeometry: `tensor-malformed` for an object without any of the interfaces, or whose answers make no sense.
    """
    try:
        found = _found(tensor)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise refusal(
            "tensor-malformed", f"A {type(tensor).__name__} does not say where it lies: {error!r}."
        ) from error
    if found is None:
        raise refusal(
            "tensor-malformed",
            f"A {type(tensor).__name__} is no tensor: it has neither PyTorch's data_ptr(), stride() and element_size() "
            "nor an array interface.",
        )
    if len(found.shape) != len(found.strides_bytes) or found.element_bytes < 1 or found.address < 1:
        raise refusal(
            "tensor-malformed",
            f"A {type(tensor).__name__} lies at {found.address} with shape {found.shape}, strides {found.strides_bytes} "
            f"and {found.element_bytes} bytes an element; that is no memory of a cache.",
        )
    return found


def _found(tensor: object) -> TensorMemory | None:
    if all(hasattr(tensor, name) for name in ("data_ptr", "stride", "element_size")):
        return _of_torch(cast("TorchLike", tensor))
    if hasattr(tensor, "__cuda_array_interface__"):
        return _of_interface(cast("CudaArrayLike", tensor).__cuda_array_interface__, "VRAM")
    if hasattr(tensor, "__array_interface__"):
        return _of_interface(cast("ArrayLike", tensor).__array_interface__, "DRAM")
    return None


def _of_torch(tensor: TorchLike) -> TensorMemory:
    element_bytes = int(tensor.element_size())
    kind: MemoryKind = "DRAM" if getattr(tensor.device, "type", "cpu") == "cpu" else "VRAM"
    return TensorMemory(
        int(tensor.data_ptr()),
        tuple(int(count) for count in tensor.shape),
        tuple(int(step) * element_bytes for step in tensor.stride()),
        element_bytes,
        kind,
        int(getattr(tensor.device, "index", None) or 0),
    )


def _of_interface(interface: Mapping[str, object], kind: MemoryKind) -> TensorMemory:
    """Read an array interface; one without strides is dense, the last axis innermost."""
    size = _TYPE_TEXT.fullmatch(str(interface["typestr"]))
    if size is None:
        raise ValueError(f"typestr {interface['typestr']!r}")
    element_bytes = int(size[1])
    shape = tuple(int(count) for count in cast("Sequence[int]", interface["shape"]))
    strides = cast("Sequence[int] | None", interface.get("strides"))
    if strides is None:
        strides = [element_bytes * prod(shape[place + 1 :]) for place in range(len(shape))]
    address = int(cast("Sequence[int]", interface["data"])[0])
    return TensorMemory(address, shape, tuple(int(step) for step in strides), element_bytes, kind, 0)
