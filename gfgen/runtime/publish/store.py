"""Stores of objects, none of which is ever replaced: a bucket of S3 or its like, and the folder of a run.

A bucket is written by conditional PUTs alone (If-None-Match: *). A PUT without an answer may have arrived, so
`put` looks before anyone tries again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from gfgen.errors import InputError, LockedError, OutputError, in_one_line, without_secrets
from gfgen.runtime.ipc.content import Content, content_of, name_file, temporary_name

logger = logging.getLogger(__name__)

LEASE_NAME = "gfgen-lease.json"
TIMEOUT_S = 60.0  # for an answer of the store
_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for one of ~/.aws/credentials"


class StoreError(OutputError):
    """A request failed or had no answer; it may succeed later."""


class TakenError(OutputError):
    """Another object has the name."""


class Folder:
    """A folder of this machine, which only the run that has its lock writes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def names(self, beginning: str) -> list[str]:
        return sorted(path.name for path in Path(self.url).glob(f"{beginning}*"))

    def fetch(self, name: str, path: Path) -> None:
        shutil.copyfile(Path(self.url, name), path)

    def put(self, name: str, path: Path, content: Content, *, job: str = "") -> Content:
        """As `Bucket.put`."""
        place = Path(self.url, name)
        temporary = temporary_name(place)
        try:
            shutil.copyfile(path, temporary)
            return name_file(temporary, place, replaces=None, made_for=None)
        except OutputError:
            if content_of(place) != content:
                raise TakenError(f"{place} is there already, with another content") from None
            return content
        except OSError as error:
            raise StoreError(f"{place}: {error.strerror}") from None
        finally:
            temporary.unlink(missing_ok=True)

    def taken(self, hashes: Mapping[str, str]) -> str | None:
        """None: the run has looked before."""

    def hold(self, owner: str, *, lease_s: float) -> None:
        """No effect: the run has the lock of the folder."""


class Bucket:
    def __init__(self, url: str) -> None:
        """Raises: InputError without s3fs."""
        try:
            from s3fs import S3FileSystem
        except ImportError:
            raise InputError(f"-o {url} needs s3fs; pip install 'gfgen[data]'") from None
        self.url = url
        self._folder = f"{url.removeprefix('s3://')}/"
        # Whoever tries again looks before, so nobody else does.
        config = {"connect_timeout": 10, "read_timeout": TIMEOUT_S, "retries": {"total_max_attempts": 1}}
        self._fs = S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
        self._fs.retries = 1
        self._etag: str | None = None  # of the lease

    def _call(self, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Raises: TakenError when a condition is not met; FileNotFoundError; StoreError for all else."""
        try:
            return function(*given, **options)
        except FileNotFoundError:
            raise
        except Exception as error:  # of s3fs, botocore, aiohttp or the network
            answer = getattr(error.__cause__, "response", {}).get("ResponseMetadata", {})
            kind = TakenError if answer.get("HTTPStatusCode") == 412 else StoreError
            hint = f": {_KEYS}" if "Credentials" in type(error).__name__ else ""  # they may come back
            raise kind(without_secrets(f"{self.url}: {in_one_line(error)}{hint}")) from None

    def _ask(self, method: str, name: str, **options: Any) -> Any:
        bucket, _, key = f"{self._folder}{name}".partition("/")
        return self._call(self._fs.call_s3, method, Bucket=bucket, Key=key, **options)

    def names(self, beginning: str) -> list[str]:
        """The sorted names that begin so. Raises: InputError when there is no such bucket; StoreError."""
        try:
            found = self._call(self._fs.find, self._folder, prefix=beginning)
        except FileNotFoundError:
            raise InputError(f"{self.url}: there is no such bucket; make it first") from None
        return sorted(name.removeprefix(self._folder) for name in found)

    def fetch(self, name: str, path: Path) -> None:
        """Copy an object to a file here. Raises: StoreError."""
        self._call(self._fs.get_file, self._folder + name, str(path))

    def put(self, name: str, path: Path, content: Content, *, job: str = "") -> Content:
        """Store a file whole; returns the content that has the name: this, or one of the same job.

        job: the hash of the job that made it, if it is of one job.
        Raises: TakenError; StoreError.
        """
        place, mark = self._folder + name, {"sha256": content.sha256 or "", "job": job}
        try:
            self._call(self._fs.put_file, str(path), place, mode="create", max_concurrency=2, Metadata=mark)
            return content
        except (OutputError, FileNotFoundError) as error:  # it may have arrived, now or in an earlier try
            try:
                found = self._ask("head_object", name)
            except FileNotFoundError:
                raise StoreError(str(error)) from None
        there = Content(found["ContentLength"], found["Metadata"].get("sha256"))
        if there != content and (not job or found["Metadata"].get("job") != job):
            raise TakenError(f"{self.url}/{name} is there already, with another content")
        return there

    def taken(self, hashes: Mapping[str, str]) -> str | None:
        """A name that an object of another job has; `hashes` are of jobs, by name. Raises: StoreError."""
        beginning = os.path.commonprefix([*hashes])  # noqa: RUF071, of characters
        for name in sorted(hashes.keys() & self.names(beginning)):
            if self._ask("head_object", name)["Metadata"].get("job") != hashes[name]:
                return name
        return None

    def hold(self, owner: str, *, lease_s: float) -> None:
        """Take or renew the lease, which is an object in place of a folder's lock; its age counts by the
        store's clock. An owner that comes back takes its own at once: it has the lock of its local folder.

        Raises: LockedError; InputError for a store that ignores conditions; StoreError.
        """
        now, who = f"{time.time():.3f}", f"process {os.getpid()} on {socket.gethostname()}"
        mark = {"owner": owner, "who": who, "lease-s": f"{lease_s:g}", "written": now}
        body = {"Metadata": mark, "Body": json.dumps(mark).encode()}
        if self._etag is None:
            try:
                self._etag = self._ask("put_object", LEASE_NAME, IfNoneMatch="*", **body)["ETag"]
            except TakenError:
                self._etag = self._free_lease(owner)
            try:
                self._ask("put_object", LEASE_NAME, IfNoneMatch="*", Body=b"")
                raise InputError(f"{self.url}: this store replaces objects in spite of If-None-Match")
            except TakenError:
                pass
        for _ in range(2):
            try:
                self._etag = self._ask("put_object", LEASE_NAME, IfMatch=self._etag, **body)["ETag"]
                return
            except TakenError:  # by another run, or by this one, without an answer
                self._etag = self._free_lease(owner)
        raise LockedError(f"{self.url}: another run has just taken it; wait for it, or name another --output")

    def _free_lease(self, owner: str) -> str:
        """The etag of a lease that this owner may take."""
        found = self._ask("head_object", LEASE_NAME)
        said, now = found["Metadata"], found["ResponseMetadata"]["HTTPHeaders"]["date"]
        age_s = (parsedate_to_datetime(now) - found["LastModified"]).total_seconds()
        lease_s = float(said.get("lease-s", 0))
        left_s = lease_s and lease_s - age_s
        if said.get("owner") != owner and left_s > 0:
            raise LockedError(
                f"{self.url} is in use by another run ({said.get('who')}); wait for it "
                f"({left_s:.0f} s if it was killed), or name another --output"
            )
        return str(found["ETag"])


Store = Folder | Bucket
