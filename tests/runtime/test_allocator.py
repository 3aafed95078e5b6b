"""What the allocator does with memory that a task has freed."""

import subprocess
import sys

FILL = """
import ctypes, resource
from gfgen.runtime.allocator import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""


def test_freed_memory_is_used_again_without_the_kernel():
    ran = subprocess.run([sys.executable, "-c", FILL], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 1000  # of 16,384 pages
