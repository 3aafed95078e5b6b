"""What `gfgen run` checks before it starts: each file has one purpose; foreign files stay; its cluster."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gfgen.cli.options import LogOptions, NamedPath, flag, given_in, option
from gfgen.errors import InputError, Problem
from gfgen.job.reader import JobSource
from gfgen.job.spec import ENDINGS, slug
from gfgen.policies.catalog import BUILT_IN, load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.files.index import INDEX_NAME, ManifestIndex
from gfgen.runtime.files.manifest import MANIFEST_NAME
from gfgen.runtime.files.ownership import Claims, check_free
from gfgen.runtime.publish.shards import DEFAULT_SIZE, SUFFIXES, Shards
from gfgen.session.admission import Admission, jobs_to_run, judge
from gfgen.session.session import Session, SessionOptions
from gfgen.system.home import home

if TYPE_CHECKING:
    from gfgen.cluster.ray_cluster import RayCluster
    from gfgen.runtime.publish.publisher import Publisher
    from gfgen.session.filters import FileHook, Filter

logger = logging.getLogger(__name__)
Options = TypeVar("Options", bound=SessionOptions)
LONG_BYTES = 2**20
"""Of job files for which the folder gets an index."""
LOCAL = "local"
"""The value of --ray that starts a cluster on this machine."""


def check_written(files: Sequence[Path], written: Mapping[str, Path | None]) -> None:
    named = {os.path.realpath(file): "the job file itself" for file in files}
    for name, path in written.items():
        if path is not None:
            check_free(path, name, named)
            if path.suffix.lower() in (*ENDINGS, ".bmp"):
                raise InputError(f"{name} {path}: is a picture or a video by its name; name another file")
            named[os.path.realpath(path)] = f"the file of {name}, too"


def check_watched(folder: Path, output_dir: Path) -> None:
    if not os.path.isdir(folder):
        raise InputError(f"--watch {folder}: is no folder; make one, then put job files into it")
    if os.path.realpath(folder) == os.path.realpath(output_dir):
        raise InputError(f"--watch {folder}: this is also the output folder; name another with --output")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(SessionOptions):
    trace: Path | None
    logs: LogOptions
    skip_invalid: bool = False
    overwrite: bool = False
    failed: bool = False
    on_file: FileHook | None = None
    keep_if: Filter | None = None
    on_done: str | None = None
    hook_timeout_s: float = 60.0
    retries: int = 0
    force: bool = False
    cluster: RayCluster | None = None
    publisher: Publisher | None = None


def claims_of(source: JobSource, options: RunOptions) -> Claims:
    return Claims(
        output_dir=options.output_dir,
        job_file=options.job_file,
        inputs=source.paths,
        overwrite=options.overwrite,
        force=options.force,
        only_failed=options.failed,
        named_at=options.named_at,
        published={} if options.publisher is None else options.publisher.published,
    )


def admit_jobs(
    source: JobSource, admission: Admission, options: RunOptions
) -> tuple[Sequence[AdmittedJob], Claims, Sequence[Problem]]:
    """The jobs, the finished ones among the claims, and the problems. Raises: as `judge`."""
    claims = claims_of(source, options)
    is_long = sum(path.stat().st_size for path in source.paths if path.is_file()) > LONG_BYTES
    looks_at_all = options.force or options.failed or options.keep_if is not None
    can_repeat = "-" not in source.files and all(path.is_file() for path in source.paths)
    if can_repeat and not looks_at_all and (is_long or (options.output_dir / INDEX_NAME).exists()):
        claims.index = ManifestIndex(options.output_dir, is_kept=True)
        context = f"{version('gfgen')} {options.model} {options.ranks.has_random_weights}{source.lora_folder}"
        source = replace(source, index=claims.index, context=context)
    try:
        found = judge(source, admission, claims=claims, has_bar=has_bar(options))
        admitted, problems = jobs_to_run(found, skip_invalid=options.skip_invalid)
    except BaseException:
        if claims.index is not None and not (options.output_dir / MANIFEST_NAME).exists():
            (options.output_dir / INDEX_NAME).unlink(missing_ok=True)  # a new folder stays empty
        raise
    if claims.index is not None:
        claims.index.keep()
    claims.num_known = found.parsed.num_done
    return admitted, claims, problems


def options_of(kind: type[Options], given: Any, cluster: RayCluster | None, **own: Any) -> Options:
    """Options of a session: those that a command was given, its ranks and policy, and `own`."""
    same = {each.name: getattr(given, each.name) for each in fields(kind) if hasattr(given, each.name)}
    ranks = given.ranks.found() if cluster is None else cluster.ranks
    made = {"ranks": ranks, "policy": load_policy(given.policy), "lookahead_s": given.lookahead / 1000}
    return kind(**same | made | {"cluster": cluster} | own)


def session_of(options: SessionOptions, cluster: RayCluster | None) -> Session:
    if cluster is None:
        return Session(options)
    from gfgen.cluster.session import ClusterSession

    return ClusterSession(options, cluster)


def has_bar(options: RunOptions) -> bool:
    from gfgen.cli.shown.board import has_cursor

    return has_cursor(sys.stderr) and not (options.logs.quiet or options.logs.log_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    ray: str | None = option(
        "Run on the nodes of a Ray cluster: HOST:PORT, auto for the one of this machine, or local to "
        "start one here (docs/cluster.md).",
        metavar="ADDRESS",
    )
    shared: bool = flag("With --ray: all nodes have the same folders; use them.")
    ray_nodes: int | None = option("Use at most N nodes. [all]", type=click.IntRange(1, 1000), metavar="N")
    ray_resources: str | None = option(
        'Use only nodes with these resources of Ray, as {"h200": 1}.', metavar="JSON"
    )
    ray_scale: bool = flag(
        "Ask Ray's autoscaler for as many nodes as the open jobs fill, at most those of --ray-nodes."
    )

    def check(self, others: Mapping[str, bool]) -> None:
        """Raises UsageError for options that need --ray, or that are for one machine."""
        given = given_in(self, "shared", "ray_nodes", "ray_resources", "ray_scale")
        if self.ray is None and given is not None:
            raise click.UsageError(f"{given} goes with --ray")
        if self.ray == LOCAL and self.ray_scale:
            raise click.UsageError(
                "--ray-scale goes with a cluster that has an autoscaler; --ray local has none"
            )
        other = next((name for name, is_given in others.items() if is_given), None)
        if self.ray is not None and other is not None:
            raise click.UsageError(f"{other} goes with one machine; leave out --ray")

    @contextlib.contextmanager
    def connected(self, given: Any, *, model: str, output_dir: Path) -> Iterator[RayCluster | None]:
        """The cluster of a command with these options; None without --ray. Raises: InputError."""
        if self.ray is None:
            yield None
            return
        if given.policy.partition(",")[0].strip() not in BUILT_IN:
            known = ", ".join(BUILT_IN)
            raise InputError(f"--policy {given.policy}: nodes have no such file; with --ray, one of {known}")
        from gfgen.cluster.member import MemberOptions  # only here: a run on one machine has no use for Ray
        from gfgen.cluster.ray_cluster import RayCluster
        from gfgen.cluster.ray_node import RayOptions

        options = RayOptions(
            address=self.ray,
            member=MemberOptions(
                policy=given.policy,
                model=model,
                ranks=given.ranks,
                lookahead_s=given.lookahead / 1000,
                work_dir=os.getcwd(),
            ),
            output_dir=output_dir,
            is_shared=self.shared,
            num_nodes=self.ray_nodes,
            resources=_resources(self.ray_resources),
            scales=self.ray_scale,
        )
        with RayCluster(options) as cluster:
            yield cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    shards: str | None = option(
        "Put the files of many jobs into one: tars for WebDataset, or Parquet (docs/data.md).",
        type=click.Choice(tuple(SUFFIXES)),
    )
    shard_size: str = option(
        "Close a shard when it has this many jobs or bytes.", default=DEFAULT_SIZE, metavar="JOBS,SIZE"
    )
    state: Path | None = option(
        "With -o s3://...: folder of the run, where files wait. [in ~/.local/state/gfgen]", type=NamedPath()
    )

    def publisher(self, output: Path | str, given: Any) -> Publisher | None:
        """What puts files where they go; None if they stay in the folder. Raises: InputError; UsageError."""
        if isinstance(output, Path) and self.state is not None:
            raise click.UsageError("--state goes with -o s3://...")
        if self.shards is None and isinstance(output, Path):
            if given_in(self, "shard_size"):
                raise click.UsageError("--shard-size goes with --shards, or with -o s3://...")
            if os.path.exists(output):
                from gfgen.runtime.publish.publisher import RECORD_NAME  # which new folders do not need

                if (output / RECORD_NAME).exists():
                    raise InputError(f"--output {output}: is the folder of a run with --shards or a store")
            return None
        from gfgen.runtime.publish.publisher import Publisher

        names = ("watch", "on_file", "force", "overwrite")
        if name := given_in(given, *names) or given_in(given.cluster, "ray"):
            raise click.UsageError(f"{name} goes with files in a folder; leave out --shards and s3://")
        shards, is_filtered = Shards.of(self.shards, self.shard_size), given.keep_if is not None
        if isinstance(output, Path):
            return Publisher(str(output), output, shards, is_filtered=is_filtered)
        url = output.rstrip("/")
        base = Path(os.environ.get("XDG_STATE_HOME") or home() / ".local/state") / "gfgen"
        own = base / f"{slug(url)}-{hashlib.sha256(url.encode()).hexdigest()[:6]}"
        return Publisher(url, self.state or own, shards, is_filtered=is_filtered)


def _resources(text: str | None) -> Mapping[str, float]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(least) in (int, float) for least in found.values()):
        raise InputError(f'--ray-resources {text}: JSON like {{"h200": 1}} is accepted')
    return found
