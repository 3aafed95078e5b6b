"""Where profiles are kept, and which one is this machine's.

<cache>/profiles/<device>-gfgen-<version>.json     what `gfgen profile` wrote here
gfgen/models/profiles/*.json                       what comes with gfgen, by the device's name
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from gfgen.errors import InputError
from gfgen.models import registry
from gfgen.runtime.admission import AdmittedJob
from gfgen.runtime.machine import cpu_name, file_stem, versions
from gfgen.runtime.profile import Profile, load_profile

logger = logging.getLogger(__name__)

SHIPPED = Path(registry.__file__).parent / "profiles"


def default_path(device: str | None = None) -> Path:
    """Where a profile of this device (of this machine's CPU ranks) lies, if there is one."""
    name = file_stem(device or cpu_name())
    return registry.cache_dir() / "profiles" / f"{name}-gfgen-{versions().get('gfgen', 'unknown')}.json"


def find_profile(device: str | None = None) -> tuple[Path, Profile] | None:
    """The profile of this device: measured here, or shipped; None when there is none that can be read."""
    device = device or cpu_name()
    own = default_path(device)
    for path in [own, *sorted(SHIPPED.glob("*.json"))]:
        if not path.is_file():
            continue
        try:
            profile = load_profile(path)
        except InputError as error:
            logger.warning("%s", error)
            continue
        if path == own or profile.device == device:
            return path, profile
    return None


@cache
def shipped_profiles() -> tuple[Profile, ...]:
    """Those that come with gfgen; they are of other machines, as a rule."""
    return tuple([load_profile(path) for path in sorted(SHIPPED.glob("*.json"))])


def first_fitting(
    profiles: Iterable[Profile], jobs: Sequence[AdmittedJob], *, num_ranks: int
) -> Profile | None:
    """The first that has the jobs' models and knows so many ranks."""
    fitting = (each for each in profiles if each.knows(jobs) and num_ranks <= each.num_ranks)
    return next(fitting, None)


def open_profile(path: Path | None) -> Profile:
    """The profile in a file, or this machine's when none is named.

    Raises: InputError when there is none, or it cannot be read.
    """
    if path is not None:
        return load_profile(path)
    found = find_profile()
    if found is None:
        raise InputError(
            f"there is no profile of this machine ({cpu_name()}): measure one with 'gfgen profile JOBS', or "
            "name one with --profile FILE"
        )
    return found[1]


def save_profile(profile: Profile, path: Path) -> Profile:
    """Write a profile, with the other shapes of one that is there of the same device, ranks and versions.

    Raises: InputError when the file cannot be written.
    """
    if path.is_file():
        profile = _with_rows_of(profile, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.part")
        partial.write_text(profile.as_json())
        partial.rename(path)
    except OSError as error:
        raise InputError(f"--output {path}: cannot be written ({error.strerror})") from None
    return profile


def check_replaceable(path: Path) -> None:
    """Refuse a file that holds something else than a profile, of whatever format: it would be lost.

    Raises: InputError for it.
    """
    if not path.is_file():
        return
    try:
        text = path.read_text()
        content = json.loads(text) if text else {}
    except OSError as error:
        raise InputError(f"--output {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or (content and not {"format", "rows"} <= content.keys()):
        raise InputError(f"--output {path}: is there and is no profile; name another file")


def _with_rows_of(profile: Profile, path: Path) -> Profile:
    try:
        before = load_profile(path)
    except InputError:
        return profile
    same = (before.device, before.num_ranks, before.versions)
    if same != (profile.device, profile.num_ranks, profile.versions):
        logger.info("%s was of another device, version or number of ranks: it is replaced", path)
        return profile
    measured = {(row.model, row.shape) for row in profile.rows}
    kept = [row for row in before.rows if (row.model, row.shape) not in measured]
    return replace(profile, rows=(*kept, *profile.rows))
