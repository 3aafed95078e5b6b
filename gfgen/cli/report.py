"""`gfgen report`: an output folder as text, JSON or a page. `gfgen plot`: pictures of traces."""

from __future__ import annotations

import base64
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from gfgen.cli.options import NamedPath, configure_log
from gfgen.cli.shown.picture import MAX_ON_SHEET, cell_side, draw_sheet, find_traces, plot_runs
from gfgen.cli.shown.plot_timeline import plot_timeline
from gfgen.errors import InputError
from gfgen.job.images import ImageError, as_rgb, small_picture, thumbnail
from gfgen.job.spec import numbered_name
from gfgen.runtime.files.journal import JOURNAL_NAME, left_ids, num_waiting, to_make_again
from gfgen.runtime.files.manifest import (
    MANIFEST_NAME,
    SIMULATED,
    ManifestLine,
    ended_at,
    of_each_file,
    read_manifest,
)
from gfgen.runtime.files.ownership import check_free
from gfgen.system.wording import counted, in_words, named, size_in_words

logger = logging.getLogger(__name__)

THUMBNAIL_SIDE = 320
MAX_THUMBNAILS = 3_000
"""About 30 MB of HTML; later jobs have a link alone."""
MAX_SLOWEST = 3
PAUSE_S = 300.0
"""A longer time without jobs parts two timelines."""
BAR_WIDTH, CHAR_WIDTH, TICK_WIDTH, MAX_WIDTH = 64, 7, 120, 60_000
"""Pixels of an average bar, a character of its name, the axis between two ticks, and of a timeline."""
STATUSES = ("left", "waiting", "failed", "cancelled", "dropped", "done")


@click.command()
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=NamedPath())
@click.option(
    "--output",
    "-o",
    type=NamedPath(),
    help="File for the picture: .png, .svg or .pdf. [timeline.png or comparison.png]",
)
@click.option("--title", help="Title of the picture. [from the traces]")
def plot(*, traces: tuple[Path, ...], output: Path | None, title: str | None) -> None:
    """Draw the trace of a run or a simulation as a timeline: one lane per rank, one colour per job.

    Given several traces, or a folder with several, it compares deadlines met, latencies and throughput.
    """
    found = find_traces(traces)
    output = output or Path("timeline.png" if len(found) == 1 else "comparison.png")
    check_free(output, "--output")
    if len(found) == 1:
        plot_timeline(found[0], output, title=title)
    else:
        plot_runs(found, output, title=title)
    click.echo(str(output))


@click.command()
@click.argument("folder", metavar="DIR", type=NamedPath(exists=True, file_okay=False))
@click.option("--html", "as_html", is_flag=True, help="Write a page with a gallery to DIR/report.html.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--output", "-o", type=NamedPath(dir_okay=False), help="Another file for the page.")
@click.option("--sheet", type=NamedPath(dir_okay=False), help="Draw all pictures, labelled, into this .png.")
def report(*, folder: Path, as_html: bool, as_json: bool, output: Path | None, sheet: Path | None) -> None:
    """Report on the output folder DIR of runs: what was made, when, how long it took, and what failed.

    The page of --html is one file: it has thumbnails, prompts, seeds, times and failures, and links to the
    files. A --sheet has each picture, and the first frame of each video, with its prompt and id; more than
    500 become several sheets.
    """
    configure_log("warning")
    found = FolderReport.read(folder)
    sheets = {} if sheet is None else _sheets(found, sheet)
    page = (output or folder / "report.html") if as_html or output is not None else None
    for path in (*sheets, *filter(None, [page])):
        check_free(path, "--output" if path == page else "--sheet")
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        click.echo("\n".join(found.lines()))
    for path, shown in sheets.items():
        _write_sheet(path, shown)
        click.echo(f"the sheet is {path}", err=as_json)
    if page is None:
        return
    try:
        page.write_text(found.as_html(page), encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{page}: cannot be written ({error.strerror}); name another --output") from None
    click.echo(f"the page is {page}", err=as_json)


class JobReport:
    def __init__(self, line: ManifestLine, ended_at: float) -> None:
        timings, shape = line.get("timings") or {}, line.get("shape") or {}
        self.line, self.ended_at = line, ended_at
        self.job_id, self.status = str(line["id"]), str(line.get("status"))
        self.busy_s, self.latency_s = (float(timings.get(each) or 0.0) for each in ("busy_s", "latency_s"))
        self.first_uses_s = float(timings.get("first_uses_s", 0.0))
        times: tuple[Any, Any] = timings.get("started_s"), timings.get("ended_s")
        self.started_at = ended_at if None in times else ended_at - float(times[1] - times[0])
        self.num_frames = int(shape.get("frames") or 1)
        self.files = [each["file"] for each in of_each_file(line) if each.get("file")]
        facts = [f"{shape.get('width')}x{shape.get('height')}"]
        facts += [f"{self.num_frames} frames"] if self.num_frames > 1 else []
        facts += [f"{line.get('steps')} steps", f"seed {line.get('seed')}", str(line.get("model"))]
        self.facts = ", ".join(facts)

    def pictures(self, folder: Path) -> Iterator[tuple[Path, str, str]]:
        """Each picture that is there, with prompt and name; of a video the file, or its first frame."""
        files = self.files[:1] if self.num_frames > 1 else self.files
        for number, file in enumerate(files, start=1):
            if (folder / file).is_file():
                name = self.job_id if len(files) == 1 else f"{self.job_id}, {number}"
                yield folder / file, str(self.line.get("prompt") or ""), name


@dataclass(frozen=True, slots=True)
class FolderReport:
    folder: Path
    jobs: Sequence[JobReport]
    left: Collection[str]
    """Jobs that have not ended in the last run that had them, although an earlier one may have a line."""
    waiting: int
    """How many jobs of the last run that have not arrived."""

    @classmethod
    def read(cls, folder: Path) -> FolderReport:
        lines = read_manifest(folder / MANIFEST_NAME)
        left = left_ids(folder / JOURNAL_NAME, lines)
        waiting = num_waiting(folder / JOURNAL_NAME, lines)
        changed = dict.fromkeys(to_make_again(folder), "waiting") | dict.fromkeys(left, "left")
        jobs = [
            JobReport(line | {"status": changed.get(name, line.get("status"))}, ended_at(line))
            for name, line in lines.items()
            if not line.get(SIMULATED)
        ]
        if not jobs and not left and not waiting:
            raise InputError(f"{folder}: no jobs in {MANIFEST_NAME} there; name the output folder of a run")
        jobs.sort(key=lambda job: (STATUSES.index(job.status), job.started_at))
        return cls(folder, jobs, left, waiting)

    @property
    def counts(self) -> Counter[str]:
        return Counter(job.status for job in self.jobs) | Counter(left=len(self.left), waiting=self.waiting)

    @property
    def again(self) -> str | None:
        """The command that runs failed jobs again; None if none failed, or if their job file is gone."""
        files = {str(job.line.get("job_file")) for job in self.jobs if job.status == "failed"}
        paths = [(self.folder / file).resolve() for file in sorted(files - {"None", "-"})]
        here = Path.cwd()
        named = [
            str(path.relative_to(here) if path.is_relative_to(here) else path)
            for path in paths
            if path.is_file()
        ]
        named += ["..."] if "-" in files else []  # prompts, or standard input
        return f"gfgen run {' '.join(named)} -o {self.folder} --failed" if named else None

    def lines(self) -> Iterator[str]:
        done = [job for job in self.jobs if job.status == "done"]
        counts = self.counts
        shown = ", ".join(f"{counts[each]} {each}" for each in reversed(STATUSES) if counts[each])
        yield f"{self.folder}: {counted(counts.total(), 'job')}: {shown}"
        if self.left:
            names = named(sorted(self.left), "job")
            yield f"left      {names}: run the same command again to go on"
        if self.waiting:
            yield f"waiting   {counted(self.waiting, 'job')} of the last run had not arrived"
        if not self.jobs:
            return
        first, last = min(job.started_at for job in self.jobs), max(job.ended_at for job in self.jobs)
        busy = in_words(sum(job.busy_s for job in self.jobs))
        yield f"made      {_clock(first)} to {_clock(last)}, with {busy} of rank time"
        if first_uses_s := sum(job.first_uses_s for job in self.jobs):
            yield f"first use {in_words(first_uses_s)} of it in tasks that were the first of their kind"
        made = [file for job in done for file in of_each_file(job.line)]
        kinds = Counter(Path(str(file.get("file"))).suffix.lstrip(".").upper() for file in made)
        size = sum(file.get("size_bytes") or 0 for file in made)
        files = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
        yield f"files     {', '.join([*files, size_in_words(size)])}"
        if due := [job for job in self.jobs if job.line.get("met_deadline") is not None]:
            yield f"deadlines {sum(bool(job.line['met_deadline']) for job in due)} of {len(due)} met"
        slowest = sorted(done, key=lambda job: -job.busy_s)[:MAX_SLOWEST]
        if slowest:
            yield f"slowest   {', '.join(f'{job.job_id} {in_words(job.busy_s)}' for job in slowest)}"
        for job in self.jobs:
            if job.status == "failed":
                yield f"failed    {job.job_id}: {job.line.get('error')}"
        if self.again is not None:
            yield f"again     {self.again}, with the prompts and options that the run had"

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "counts": {status: self.counts[status] for status in STATUSES},
            "busy_s": round(sum(job.busy_s for job in self.jobs), 6),
            "again": self.again,
            "left": sorted(self.left),
            "jobs": [
                {**job.line, "started_at": round(job.started_at, 3), "ended_at": round(job.ended_at, 3)}
                for job in self.jobs
            ],
        }

    def as_html(self, target: Path) -> str:
        from jinja2 import Environment, PackageLoader

        pages = Environment(loader=PackageLoader(__package__, "shown"), autoescape=True)
        pages.filters |= {"clock": _clock, "in_words": in_words}
        return pages.get_template("report.html").render(
            title=f"{self.folder.name or self.folder}: {counted(self.counts.total(), 'job')}",
            summary="\n".join(self.lines()),
            timelines=list(_timelines(self.jobs)),
            cards=[(job, _file_of(job, self.folder, target.parent, n)) for n, job in enumerate(self.jobs)],
        )


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _file_of(job: JobReport, folder: Path, page_folder: Path, number: int) -> Mapping[str, str | None] | None:
    path = folder / str(job.line.get("file"))
    if not job.line.get("file") or not path.is_file():
        return None
    url, page_folder, small = path.absolute(), page_folder.absolute(), None
    try:
        if number < MAX_THUMBNAILS:
            small = base64.b64encode(thumbnail(path, THUMBNAIL_SIDE)).decode()
    except (OSError, ValueError, ImageError) as error:
        logger.warning("no thumbnail of %s: %s", path, error)
    url = url.relative_to(page_folder) if url.is_relative_to(page_folder) else url
    return {"name": path.name, "url": quote(os.fsencode(url)), "thumbnail": small}


def _sheets(found: FolderReport, sheet: Path) -> Mapping[Path, Sequence[tuple[Path, str, str]]]:
    shown = [each for job in found.jobs for each in job.pictures(found.folder)]
    parts = [shown[start : start + MAX_ON_SHEET] for start in range(0, len(shown) or 1, MAX_ON_SHEET)]
    names = [sheet.name] if len(parts) == 1 else [numbered_name(sheet.name, 1 + i) for i in range(len(parts))]
    return {sheet.with_name(name): part for name, part in zip(names, parts, strict=True)}


def _write_sheet(target: Path, shown: Sequence[tuple[Path, str, str]]) -> None:
    cells = []
    for path, prompt, name in shown:
        try:
            cells.append((as_rgb(small_picture(path, cell_side(len(shown)))), prompt, name))
        except (OSError, ValueError, ImageError) as error:
            logger.warning("%s is not on the sheet: %s", path, error)
    if not cells:
        raise InputError(f"{target}: none of the jobs has a picture or video that can be shown")
    try:
        draw_sheet(cells).save(target)
    except (OSError, ValueError) as error:  # another suffix is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{target}: cannot be written ({reason}); name another --sheet") from None


def _timelines(jobs: Sequence[JobReport]) -> Iterator[Mapping[str, Any]]:
    """Lanes of bars, each from a job's first task to its file; a timeline for each time without a pause."""
    stretches: list[list[JobReport]] = []
    last = 0.0
    for job in sorted((job for job in jobs if job.ended_at > job.started_at), key=lambda job: job.started_at):
        stretches += [[]] if job.started_at > last + PAUSE_S else []
        stretches[-1].append(job)
        last = max(last, job.ended_at)
    return map(_lanes, stretches)


def _lanes(jobs: Sequence[JobReport]) -> Mapping[str, Any]:
    """In pixels: bars of a job, its lane, x, width and name, and ticks of x and the time."""
    ends: list[float] = []
    places = []
    for job in jobs:  # the manifest has whole seconds
        lane = next((lane for lane, end in enumerate(ends) if end <= job.started_at + 1), len(ends))
        ends[lane : lane + 1] = [job.ended_at]
        places.append(lane)
    first = jobs[0].started_at
    width = max(1000, min(MAX_WIDTH, BAR_WIDTH * len(jobs) // len(ends)))
    scale, bars = width / (max(ends) - first), []
    for job, lane in zip(jobs, places, strict=True):
        size = max(1.0, (job.ended_at - job.started_at) * scale - 1)
        name = job.job_id[: int(size / CHAR_WIDTH)]
        bars.append((job, lane, (job.started_at - first) * scale, size, name))
    moments = ((x, time.localtime(first + x / scale)) for x in range(0, width, TICK_WIDTH))
    ticks = [(x, time.strftime("%H:%M:%S", moment)) for x, moment in moments]
    return {"first": first, "width": width, "height": 20 + 18 * len(ends), "bars": bars, "ticks": ticks}
