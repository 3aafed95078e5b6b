"""`python -m benchmarks.serve`: what HTTP costs, against `gfgen run`, and whether requests disturb the loop.

A server of this machine's own is started on small models, asked, and stopped. Everything is seen from
outside: by a client on the same machine, and in /metrics.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.measured import about, cpu_s, head, row, run_gfgen
from gfgen.cli.options import FiniteRange
from gfgen.errors import RunError
from gfgen.runtime.core.metrics import percentile

MODEL, SIZE, STEPS = "tiny-qwen-image", "64x64", 4
SPACING_S = 0.5
"""Between two jobs of `gfgen run`, so that each finds the ranks idle, as a lone client's do."""
NUM_LONG, LONG_STEPS = 40, 200
"""Jobs that run while the server is asked for their status."""
BURST = 900
"""Jobs of one batch, for the longest turn of the control loop."""
CLIENTS = 4
POSTS_PER_S, POSTERS = 20, 8
"""Jobs that arrive at equal distances while the ranks are busy, and the connections that they come over."""
OPEN = 24
"""Jobs that are open while one more after the other is sent and cancelled, and clients that send pictures."""
PICTURES = 200
"""Of one file, and of as many requests, for what a request costs beside the others."""
READY_S = 120.0
_TURN = re.compile(r"^gfgen_control_longest_turn_seconds\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServingReport:
    """What was found; times in seconds."""

    num_ranks: int
    run_s: Sequence[float]
    """Latency of a job in `gfgen run`, from its arrival to its file."""
    http_s: Sequence[float]
    """The same job over HTTP, from the request to the last byte of the picture."""
    post_s: Sequence[float]
    """Latency of requests for jobs, from when each should be sent, while the ranks are busy."""
    post_cpu_s: float
    """Of the HTTP process for each of them, with the events of their jobs; other programs disturb it less."""
    open_post_s: Sequence[float]
    """Latency of requests for jobs while OPEN jobs are open, one after the other."""
    file_s: float
    """Of a job file with PICTURES jobs, from its first task to its last file, for each of them."""
    requests_s: float
    """The same jobs as requests of OPEN clients that wait for their pictures."""
    status_per_s: float
    front_cpu_s: float
    """Of the HTTP process, for a thousand status requests."""
    turn_s: float
    """The control loop's longest turn so far: with jobs running and status asked for."""
    burst_turn_s: float
    """The same after a batch of many jobs."""

    @property
    def added_s(self) -> float:
        """What HTTP adds at the median."""
        return statistics.median(self.http_s) - statistics.median(self.run_s)

    @property
    def added_to_each_s(self) -> float:
        """What a request costs more than a line of a file, where many wait."""
        return self.requests_s - self.file_s


def measure_serving(*, num_ranks: int, num_jobs: int, seconds: float) -> ServingReport:
    """Jobs one by one, then status requests for so long while jobs run, then one large batch.

    Raises: RunError when `gfgen run` or the server fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = _run(folder / "alone", num_ranks=num_ranks, jobs=map(job_of_run, range(num_jobs + 1)))
        run_s = [line["timings"]["latency_s"] for line in lines if line["id"] != "0"]
        many = [job_of_run(number) | {"arrival": 0} for number in range(PICTURES)]
        times = [line["timings"] for line in _run(folder / "many", num_ranks=num_ranks, jobs=many)]
        file_s = max(each["ended_s"] for each in times) - min(each["started_s"] for each in times)
        with _server(folder, num_ranks=num_ranks) as (port, front):
            http_s = [_picture(_connected(port), number) for number in range(num_jobs)]
            began_s = time.perf_counter()
            _in_threads(lambda first: _pictures(port, first), OPEN)
            requests_s = time.perf_counter() - began_s
            jobs = [_submit(port, number) for number in range(OPEN)]
            open_post_s = _posts_and_cancels(port, seconds=seconds)
            jobs += [_submit(port, number) for number in range(OPEN, NUM_LONG)]
            before_s = cpu_s(front)
            post_s = _posts(port, seconds=seconds)
            post_cpu_s = (cpu_s(front) - before_s) / len(post_s)
            before_s = cpu_s(front)
            asked = _ask_for(port, jobs, seconds=seconds)
            front_cpu_s = 1000 * (cpu_s(front) - before_s) / asked
            turn_s = _longest_turn(port)
            _batch(port)
            time.sleep(1.0)  # until /metrics has heard of it
            burst_turn_s = _longest_turn(port)
    return ServingReport(
        num_ranks,
        run_s,
        http_s[1:],
        post_s,
        post_cpu_s,
        open_post_s,
        file_s / PICTURES,
        requests_s / PICTURES,
        asked / seconds,
        front_cpu_s,
        turn_s=turn_s,
        burst_turn_s=burst_turn_s,
    )


def table_of(report: ServingReport) -> Iterator[str]:
    """Markdown."""

    def ms(seconds: float) -> str:
        return f"{1000 * seconds:.1f} ms"

    median, rate = statistics.median, f"{report.status_per_s:,.0f} a second"
    yield head("", "asked", "found")
    for name, asked, found in (
        ("one job, `gfgen run`", "", ms(median(report.run_s))),
        ("the same over HTTP", "", ms(median(report.http_s))),
        ("added by HTTP", "under 5 ms and the transfer", f"{1000 * report.added_s:+.1f} ms"),
        (f"POST at {POSTS_PER_S} a second, busy ranks: median", "at most 8 ms", ms(median(report.post_s))),
        ("the same: P99", "at most 30 ms", ms(percentile(report.post_s, 99))),
        ("the HTTP process for each, with its events", "", f"{ms(report.post_cpu_s)} of CPU"),
        (f"POST with {OPEN} open jobs: median", "", ms(median(report.open_post_s))),
        ("the same: P99", "at most 60 ms", ms(percentile(report.open_post_s, 99))),
        (f"each of {PICTURES} jobs of a file", "", ms(report.file_s)),
        (f"each of the same as requests of {OPEN} clients", "", ms(report.requests_s)),
        ("added to each", "at most 10 ms", f"{1000 * report.added_to_each_s:+.1f} ms"),
        (f"status requests of {CLIENTS} clients", "1,000 a second on one core", rate),
        ("the HTTP process for 1,000 of them", "", f"{report.front_cpu_s:.2f} s of CPU"),
        ("longest turn of the loop meanwhile", "at most 20 ms", ms(report.turn_s)),
        (f"the same after a batch of {BURST} jobs", "at most 20 ms", ms(report.burst_turn_s)),
    ):
        yield row(name, asked, found)


# gfgen run --------------------------------------------------------------------------------------


def _run(folder: Path, *, num_ranks: int, jobs: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The lines of the manifest."""
    folder.mkdir()
    run_gfgen(jobs, folder, "--ranks", str(num_ranks), "--quiet")
    return [json.loads(line) for line in (folder / "out" / "manifest.jsonl").read_text().splitlines()]


def job_of_run(number: int) -> dict[str, object]:
    """A line of the job file."""
    job = {"id": f"{number}", "prompt": prompt_of(number), "model": MODEL, "size": SIZE, "steps": STEPS}
    return {**job, "arrival": number * SPACING_S}


def prompt_of(number: int) -> str:
    """Each way each job has its own: a rank that has encoded a prompt does not do it again."""
    return f"fox {number}"


# The server -------------------------------------------------------------------------------------


@contextmanager
def _server(folder: Path, *, num_ranks: int) -> Iterator[tuple[int, psutil.Process]]:
    """A server that is ready: its port, and the process that speaks HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gfgen", "serve", "--port", str(port), "--ranks", str(num_ranks)]
    command += ["--model", MODEL, "--max-open", "2000", "--output", str(folder / "serve"), "--quiet"]
    log = (folder / "serve.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + READY_S
        while _status_of(port, "/ready") != 200:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RunError(f"gfgen serve did not start: {(folder / 'serve.log').read_text()[-500:]}")
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        yield port, next(each for each in children if "gfgen.server.http.front" in each.cmdline())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _connected(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=300)


def _status_of(port: int, path: str) -> int:
    try:
        return _answer(_connected(port), "GET", path)[0]
    except OSError:
        return 0


def _answer(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: str | None = None,
    kind: str = "json",
) -> tuple[int, bytes]:
    connection.request(method, path, body, {"Content-Type": f"application/{kind}"})
    response = connection.getresponse()
    return response.status, response.read()


def _post(
    connection: http.client.HTTPConnection, path: str, values: Mapping[str, Any] | str, kind: str = "json"
) -> Any:
    """The JSON that is answered; an error is an error."""
    body = values if isinstance(values, str) else json.dumps(values)
    status, content = _answer(connection, "POST", path, body, kind)
    if status >= 300:
        raise RunError(f"POST {path}: {status}: {content[:300].decode(errors='replace')}")
    return json.loads(content)


def _small_job(prompt: str, *, steps: int = 2) -> dict[str, object]:
    return {"prompt": prompt, "model": MODEL, "width": 64, "height": 64, "steps": steps}


def _picture(connection: http.client.HTTPConnection, number: int) -> float:
    """Seconds until a picture is there."""
    began_s = time.perf_counter()
    values = {"prompt": prompt_of(number), "model": MODEL, "size": SIZE, "num_inference_steps": STEPS}
    _post(connection, "/v1/images/generations", values)
    return time.perf_counter() - began_s


def _pictures(port: int, first: int) -> None:
    """A client's share of PICTURES, over one connection."""
    connection = _connected(port)
    for number in range(first, PICTURES, OPEN):
        _picture(connection, 1000 + number)


def _posts_and_cancels(port: int, *, seconds: float) -> list[float]:
    connection, latencies_s = _connected(port), list[float]()
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        began_s = time.perf_counter()
        job = _post(connection, "/v1/jobs", _small_job(f"open {len(latencies_s)}"))
        latencies_s.append(time.perf_counter() - began_s)
        _answer(connection, "POST", f"/v1/jobs/{job['id']}/cancel")
    return latencies_s


def _submit(port: int, number: int) -> str:
    return str(_post(_connected(port), "/v1/jobs", _small_job(f"long {number}", steps=LONG_STEPS))["id"])


def _posts(port: int, *, seconds: float) -> list[float]:
    """Latencies of jobs that are sent at equal distances, whether or not earlier ones were answered."""
    latencies_s: list[float] = []
    began_s = time.monotonic()

    def client(first: int) -> None:
        connection = _connected(port)
        for number in range(first, int(seconds * POSTS_PER_S), POSTERS):
            due_s = began_s + number / POSTS_PER_S
            time.sleep(max(0.0, due_s - time.monotonic()))
            _post(connection, "/v1/jobs", _small_job(prompt_of(number)))
            latencies_s.append(time.monotonic() - due_s)

    _in_threads(client, POSTERS)
    return latencies_s


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work` with 0, 1, ...; raises the first error."""
    with ThreadPoolExecutor(count) as threads:
        for _ in threads.map(work, range(count)):
            pass


def _ask_for(port: int, jobs: Sequence[str], *, seconds: float) -> int:
    """How many status requests some clients get answered in that time."""
    counts = [0] * CLIENTS
    ends_s = time.monotonic() + seconds

    def client(number: int) -> None:
        connection = _connected(port)
        while time.monotonic() < ends_s:
            status, _ = _answer(connection, "GET", f"/v1/jobs/{jobs[counts[number] % len(jobs)]}")
            if status != 200:
                return
            counts[number] += 1

    _in_threads(client, CLIENTS)
    return sum(counts)


def _batch(port: int) -> None:
    """A job file of many jobs in one request."""
    job = {"prompt": "a fox", "model": MODEL, "size": SIZE, "steps": 2}
    body = "".join(f"{json.dumps(job | {'id': f'b{idx}'})}\n" for idx in range(BURST))
    _post(_connected(port), "/v1/batches", body, "jsonl")


def _longest_turn(port: int) -> float:
    _, content = _answer(_connected(port), "GET", "/metrics")
    found = _TURN.search(content.decode())
    return float(found[1]) if found else 0.0


@click.command()
@click.option("--ranks", type=click.IntRange(1, 8), default=2, show_default=True, help="Number of CPU ranks.")
@click.option(
    "--jobs", type=click.IntRange(2), default=40, show_default=True, help="Jobs to run one by one, each way."
)
@click.option(
    "--seconds",
    type=FiniteRange(1),
    default=10.0,
    show_default=True,
    help="Time to send jobs, then status requests.",
)
def main(*, ranks: int, jobs: int, seconds: float) -> None:
    """Cost of HTTP: a job over `gfgen serve` against `gfgen run`, status requests, pauses of the loop."""

    report = measure_serving(num_ranks=ranks, num_jobs=jobs, seconds=seconds)
    click.echo(about(f"serve --ranks {ranks} --jobs {jobs} --seconds {seconds:g}") + "\n")
    for line in table_of(report):
        click.echo(line)


if __name__ == "__main__":
    main()
