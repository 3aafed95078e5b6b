"""How many files a run may have open."""

from __future__ import annotations

import resource

import pytest

from gfgen.errors import InputError
from gfgen.system import descriptors


def test_as_many_files_may_be_open_as_the_system_lets() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        descriptors.allow_most()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_that_may_open_too_few_files_is_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (8, 8))
    with pytest.raises(InputError, match=r"this process may open 8 files; a run needs 64 .*\(ulimit -n\)"):
        descriptors.check_enough()
