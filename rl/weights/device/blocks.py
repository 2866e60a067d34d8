"""Bytes on a device that two processes have in common: one makes them, the other maps them by a handle in plain fields.

On a GPU they are CUDA's own memory, beside torch's allocator, whose settings do not matter. One handle serves any
number of processes. torch's own exchange counts its readers in a file in /dev/shm, which stays there when its owner is
killed. On a CPU they are a file without a name. Both end with the processes that have them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl.weights.channel import WeightsError

_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag that CUDA knows


class Handle(NamedTuple):
    """What one process tells another."""

    device: str  # a GPU's uuid, or `cpu`
    nbytes: int
    name: str  # 64 bytes of CUDA in hexadecimal digits, or the path of an open file


class Block(NamedTuple):
    handle: Handle
    data: Tensor  # (nbytes,) uint8
    close: Callable[[], None]
    """Nobody reads `data` after it."""


def make_block(nbytes: int, device: torch.device) -> Block:
    """Zeros. Raises RuntimeError, OSError where there is no room."""
    if device.type == "cpu":
        descriptor = os.memfd_create("fresco-weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        handle = Handle("cpu", nbytes, f"/proc/{os.getpid()}/fd/{descriptor}")
        return Block(handle, _view(descriptor, nbytes), lambda: os.close(descriptor))

    pointer = ctypes.c_void_p()
    name = _CudaHandle()
    _cuda(device, "cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    _cuda(device, "cudaIpcGetMemHandle", ctypes.byref(name), pointer)
    data = torch.as_tensor(_Pointer(pointer, nbytes), device=device).zero_()
    return Block(Handle(_uuid(device), nbytes, bytes(name).hex()), data, lambda: _cuda(device, "cudaFree", pointer))


def map_block(handle: Handle, device: torch.device) -> Block:
    """Raises WeightsError on another device, RuntimeError or OSError where the maker is gone."""
    here = "cpu" if device.type == "cpu" else _uuid(device)
    if here != handle.device:
        raise WeightsError(
            f"weights.transport=ipc: the learner is on {handle.device} and the engine on {here}; set placement=shared"
        )
    if device.type == "cpu":
        descriptor = os.open(handle.name, os.O_RDONLY | os.O_CLOEXEC)
        data = _view(descriptor, handle.nbytes, mmap.PROT_READ)
        os.close(descriptor)
        return Block(handle, data, lambda: None)

    pointer = ctypes.c_void_p()
    name = _CudaHandle.from_buffer_copy(bytes.fromhex(handle.name))
    _cuda(device, "cudaIpcOpenMemHandle", ctypes.byref(pointer), name, ctypes.c_uint(_PEER_ACCESS))
    data = torch.as_tensor(_Pointer(pointer, handle.nbytes), device=device)
    return Block(handle, data, lambda: _cuda(device, "cudaIpcCloseMemHandle", pointer))


class _CudaHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`, which goes by value."""

    _fields_ = [("reserved", ctypes.c_byte * 64)]


class _Pointer:
    """Device memory, as torch takes it over without a copy."""

    def __init__(self, pointer: ctypes.c_void_p, nbytes: int) -> None:
        data = pointer.value, False
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": data, "version": 3}


def _view(descriptor: int, nbytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes, prot=protection), dtype=torch.uint8)


def _uuid(device: torch.device) -> str:
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"


def _cuda(device: torch.device, function: str, *arguments: Any) -> None:
    """Call a function of CUDA's runtime, of the one that torch has loaded. Raises RuntimeError."""
    library = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    with torch.cuda.device(device):
        code = getattr(library, function)(*arguments)
    if code:
        library.cudaGetLastError()  # else torch takes it for that of its own next kernel
        library.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{function}: {library.cudaGetErrorString(code).decode()}")
