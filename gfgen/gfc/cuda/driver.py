"""The CUDA driver by ctypes: what the collectives and `gfgen doctor` need of it.

No torch and no toolkit: `libcuda.so.1` comes with the driver. Loading it initialises nothing.

Run as a program, it prints the GPUs as JSON (`probe`). Parents that fork need this: asking the driver
initialises CUDA, which must not happen in a process whose children use it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ushort,
    c_void_p,
)
from functools import cache

from gfgen.errors import RunError
from gfgen.gfc.native import each

_PINNED, _DEVICE, _POSIX_FD, _READ_WRITE = 1, 1, 1, 3
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76
SHARED_PER_BLOCK = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_P2P_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _AllocationFlags(Structure):
    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class _AllocationProp(Structure):
    _fields_ = [
        *each(c_int, "type", "handle_types"),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _AllocationFlags),
    ]


class _AccessDesc(Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class LaunchConfig(Structure):
    """CUlaunchConfig: grid and block by dimension, and where it runs."""

    _fields_ = [
        *each(c_uint, "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes"),
        *each(c_void_p, "stream", "attributes"),
        ("num_attributes", c_uint),
    ]


_U64 = POINTER(c_uint64)
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetP2PAttribute": (POINTER(c_int), c_int, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_AllocationProp), c_int),
    "cuMemCreate": (_U64, c_size_t, POINTER(_AllocationProp), c_uint64),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (_U64, c_void_p, c_int),
    "cuMemAddressReserve": (_U64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_AccessDesc), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemAlloc_v2": (_U64, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (_U64, c_void_p, c_uint),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuModuleGetGlobal_v2": (_U64, POINTER(c_size_t), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncLoad": (c_void_p,),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class Driver:
    """Calls that raise RunError with CUDA's own name of what went wrong."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.library = loaded
        for name, arguments in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes = arguments
            function.restype = c_int
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            text = c_char_p()
            self.library.cuGetErrorName(status, byref(text))
            raise RunError(f"CUDA: {name} failed with {text.value.decode() if text.value else status}")

    def integer(self, name: str, *arguments: int) -> int:
        value = c_int()
        self.call(name, byref(value), *arguments)
        return value.value

    @property
    def version(self) -> tuple[int, int]:
        """The newest CUDA that this driver runs."""
        number = self.integer("cuDriverGetVersion")
        return number // 1000, number % 1000 // 10

    @property
    def num_devices(self) -> int:
        return self.integer("cuDeviceGetCount")

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, len(text), device)
        return text.value.decode()

    def attribute(self, device: int, attribute: int) -> int:
        return self.integer("cuDeviceGetAttribute", attribute, device)

    def architecture(self, device: int) -> str:
        return f"sm_{self.attribute(device, MAJOR)}{self.attribute(device, MINOR)}"

    def memory_bytes(self, device: int) -> int:
        value = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(value), device)
        return value.value

    def can_access(self, device: int, peer: int) -> bool:
        return self.integer("cuDeviceCanAccessPeer", device, peer) != 0

    def has_nvlink(self, device: int, peer: int) -> bool:
        """Whether the link between them carries atomics, which NVLink does and PCIe does not."""
        return self.integer("cuDeviceGetP2PAttribute", _P2P_ATOMICS, device, peer) != 0

    def use(self, device: int) -> None:
        """Makes the device's primary context, the one that torch uses, current on this thread."""
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def load(self, cubin: bytes) -> int:
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), cubin)
        return module.value or 0

    def function(self, module: int, name: str) -> int:
        """A kernel, loaded for good: lazy loading behind a waiting kernel would deadlock."""
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        self.call("cuFuncLoad", function)
        return function.value or 0

    def allow_shared_memory(self, function: int, num_bytes: int) -> None:
        self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, num_bytes)

    def read_global(self, module: int, name: str, num_bytes: int) -> bytes:
        address, size = c_uint64(), c_size_t()
        self.call("cuModuleGetGlobal_v2", byref(address), byref(size), module, name.encode())
        assert size.value == num_bytes, f"{name} has {size.value} bytes"
        return self.read(address.value, num_bytes)

    def read(self, address: int, num_bytes: int) -> bytes:
        content = ctypes.create_string_buffer(num_bytes)
        self.call("cuMemcpyDtoH_v2", content, address, num_bytes)
        return content.raw

    def write(self, address: int, content: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", address, content, len(content))

    def allocate(self, num_bytes: int) -> int:
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), num_bytes)
        return address.value

    def register_host(self, address: int, num_bytes: int) -> int:
        """Pins host memory of this process; its address on the device."""
        mapped = c_uint64()
        self.call("cuMemHostRegister_v2", address, num_bytes, 3)  # portable, mapped
        self.call("cuMemHostGetDevicePointer_v2", byref(mapped), address, 0)
        return mapped.value

    def shareable(self, device: int, num_bytes: int) -> tuple[int, int, int]:
        """New device memory: (handle, bytes rounded up, file descriptor that stands for it)."""
        prop = _AllocationProp(type=_PINNED, handle_types=_POSIX_FD, location=_Location(_DEVICE, device))
        unit = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(unit), byref(prop), 0)
        size = -(-num_bytes // unit.value) * unit.value
        handle, fd = c_uint64(), c_int()
        self.call("cuMemCreate", byref(handle), size, byref(prop), 0)
        self.call("cuMemExportToShareableHandle", byref(fd), handle.value, _POSIX_FD, 0)
        return handle.value, size, fd.value

    def import_shared(self, fd: int) -> int:
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), fd, _POSIX_FD)
        return handle.value

    def map(self, handle: int, num_bytes: int, device: int, *, at: int | None = None) -> int:
        """Maps memory of any device for use by kernels of this one, and releases the handle.

        at: an address that is reserved for this since an earlier call.
        """
        address = c_uint64(at or 0)
        try:
            if at is None:
                self.call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
            self.call("cuMemMap", address.value, num_bytes, 0, handle, 0)
        finally:
            self.call("cuMemRelease", handle)  # a mapping and a descriptor keep the memory
        access = _AccessDesc(_Location(_DEVICE, device), _READ_WRITE)
        self.call("cuMemSetAccess", address.value, num_bytes, byref(access), 1)
        return address.value

    def unmap(self, address: int, num_bytes: int) -> None:
        self.call("cuMemUnmap", address, num_bytes)
        self.call("cuMemAddressFree", address, num_bytes)


SEE_DOCTOR = ": see 'gfgen doctor'"


@cache
def driver() -> Driver:
    """The driver, loaded once; raises RunError where there is none."""
    try:
        loaded = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RunError(f"needs a GPU; no NVIDIA driver ({error}){SEE_DOCTOR}") from error
    return Driver(loaded)


def probe() -> str:
    """[[name, bytes of memory, [devices whose memory it reaches], [major, minor capability]], ...], in the
    order of the driver."""
    cuda = driver()
    devices = range(cuda.num_devices)
    return json.dumps(
        [
            [
                cuda.name(device),
                cuda.memory_bytes(device),
                [peer for peer in devices if peer != device and cuda.can_access(device, peer)],
                [cuda.attribute(device, MAJOR), cuda.attribute(device, MINOR)],
            ]
            for device in devices
        ]
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(probe())
    except RunError as error:
        sys.exit(str(error))
