"""What the allocator does with memory that a task has freed."""

import subprocess
import sys

FILL = """
import ctypes, resource
from gfgen.system.machine import keep_freed_memory

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

SCATTER = """
import ctypes
from pathlib import Path
from gfgen.system.machine import give_back_freed_memory, keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def held():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line]
    return int(line.split()[1]) // 1024

keep_freed_memory()
blocks = [libc.malloc(4 << 20) for _ in range(100)]
for block in blocks:
    ctypes.memset(block, 1, 4 << 20)
for block in blocks[:-1]:
    libc.free(block)
before = held()
give_back_freed_memory()
print(before, held())
"""


def test_freed_memory_is_used_again_without_the_kernel():
    ran = subprocess.run([sys.executable, "-c", FILL], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 1000  # of 16,384 pages


def test_memory_that_is_given_back_is_not_held_below_a_block_that_is_used():
    ran = subprocess.run([sys.executable, "-c", SCATTER], capture_output=True, text=True, check=True)
    before, after = map(int, ran.stdout.split())
    assert before > 400
    assert after < 50
