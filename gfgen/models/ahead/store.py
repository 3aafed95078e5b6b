"""Triton's cache on disk, where one process makes an entry while others wait for it.

Triton has no lock: n ranks would compile the same kernels n times. It believes every entry, and its entries
hold absolute paths. Here a damaged entry counts as missing, and a folder may have been moved. Triton takes
this class by TRITON_CACHE_MANAGER (pool.py).
"""

# mypy: ignore-errors

import json
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from gfgen.system.machine import locked, prepared_dirs

WAIT_S = 30.0
"""For another process to compile a kernel, which takes at most 2 s of a core."""


class Store(FileCacheManager):
    """One entry: a kernel's files, or a library that Triton compiled."""

    def __init__(self, key, override=False, dump=False):
        super().__init__(key, override, dump)
        self._lock = None

    @property
    def _folders(self):
        return [Path(self.cache_dir), *(each / "triton" / self.key for each in prepared_dirs())]

    def get_group(self, filename):
        """The kernel's files by name. None if they are to be made, by this process until `put_group`."""
        if (found := self.whole(filename)) is None:
            self._lock = locked(Path(self.cache_dir) / "lock", timeout_s=WAIT_S)
            if (found := self.whole(filename)) is not None:
                self._lock.close()
        return found

    def put_group(self, filename, group):
        path = super().put_group(filename, group)
        if self._lock is not None:
            self._lock.close()
        return path

    def get_file(self, filename):
        return next((str(each / filename) for each in self._folders if (each / filename).is_file()), None)

    def whole(self, filename):
        """The kernel's files, if all are there."""
        for folder in self._folders:
            try:
                names = json.loads((folder / f"__grp__{filename}").read_bytes())["child_paths"]
                json.loads((folder / filename).read_bytes())
                if all((folder / name).stat().st_size for name in names):
                    return {name: str(folder / name) for name in names}
            except (OSError, ValueError, TypeError, KeyError):
                continue
        return None


class Lookup(Store):
    """Compiles nothing, and makes no folders."""

    def __init__(self, key, override=False, dump=False):
        self.key, self.cache_dir = key, str(Path(knobs.cache.dir) / key)

    def get_group(self, filename):
        """Raises: LookupError for a kernel that is to be compiled."""
        if (found := self.whole(filename)) is None:
            raise LookupError(filename)
        return found
