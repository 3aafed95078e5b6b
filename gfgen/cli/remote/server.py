"""A server by its URL: `gfgen serve` here or elsewhere."""

from __future__ import annotations

import base64
import ipaddress
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from gfgen.cli.remote.folder import Cancelled, RunStatus, Submitted, selected_jobs
from gfgen.errors import GfgenError, InputError, RunError
from gfgen.job.images import is_video
from gfgen.job.reader import JobSource, to_mapping
from gfgen.job.spec import JobSpec, default_seed, input_files
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0
SUBMIT_S = 300.0
"""A server checks all jobs of a file before it answers."""
PAGE = 100
_OF_FILES = ("output", "format", "quality")
_OWN = ("id", "arrival", *_OF_FILES)
"""Fields that a single job over HTTP does not have: the server chooses names and formats."""
_EXACT = re.compile(r"(batch|job|image|video)_[0-9a-f]{24}")


def is_loopback(host: str) -> bool:
    """Whether a name or an address certainly stays on this machine."""
    host = host.rstrip(".").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class Server:
    def __init__(self, url: str, *, key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InputError(f"{url}: a URL such as http://localhost:3000 is accepted")
        self._url = url.rstrip("/")
        host = parts.hostname or ""
        is_direct = is_loopback(host) or proxy_bypass(host)
        proxy = None if is_direct else getproxies().get(parts.scheme)
        shown = proxy and (urlsplit(proxy).netloc.rpartition("@")[2] or proxy)
        self._by_proxy = f"; the proxy {shown} was asked (no_proxy names hosts without)" if proxy else ""
        """How requests went, at the end of an error."""
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._asks_proxies = not is_direct

    def status(self) -> RunStatus:
        state = self._call("GET", "/v1/state")
        if state.get("object") != "state":
            raise self._is_no_server()
        on_ranks = {rank["task"]["job_id"] for rank in state["ranks"] if rank["task"]}
        rows = [_job_row(job, is_running=job["id"] in on_ranks) for job in state["open"]]
        rows.sort(key=lambda row: row["state"] != "running")
        names = {row["id"]: row["name"] for row in rows}
        num_running = sum(row["state"] == "running" for row in rows)
        ends = [row["ends_at"] for row in rows if row["ends_at"] is not None]
        policy = state["policy"]
        name = policy["policy"]
        return RunStatus(
            target=self._url,
            kind="server",
            state=state["status"],
            started_at=state["started_at"] or None,
            written_at=state["server_time"],
            policy=name if policy["deciding"] in (name, "") else f"{name} ({policy['deciding']})",
            counts={"running": num_running, "waiting": state["num_open"] - num_running},
            ends_at=max(ends) if ends and len(rows) == state["num_open"] else None,
            ranks=[_rank_row(rank, names) for rank in state["ranks"]],
            jobs=rows,
            recent=[_recent_row(job) for job in reversed(state["finished"][:10])],
        )

    def cancel(self, patterns: Sequence[str]) -> Cancelled:
        open_jobs = list(self._open_jobs())
        ids: dict[str, None] = {}
        unmatched = []
        for pattern in patterns:
            found = [job["id"] for job in open_jobs if _matches(job, pattern)]
            ids |= dict.fromkeys(found)
            unmatched += [] if found else [pattern]
        answers = {job_id: self._call("POST", f"/v1/jobs/{job_id}/cancel") for job_id in ids}
        cancelled = [job_id for job_id, answer in answers.items() if answer["status"] == "cancelled"]
        return Cancelled(cancelled, len(cancelled), unmatched)

    def _open_jobs(self) -> Iterator[Mapping[str, Any]]:
        query: dict[str, Any] = {"ended": "false", "limit": PAGE, "order": "asc"}
        while True:
            page = self._call("GET", "/v1/jobs", params=query)
            yield from page["data"]
            if not page["has_more"]:
                return
            query["after"] = page["last_id"]

    def submit(self, source: JobSource) -> Submitted:
        specs = selected_jobs(source).specs
        for name in _OF_FILES:
            if any(getattr(spec, name) for spec in specs):
                logger.warning("%s has no effect: the server names and encodes files itself", name)
        single = [_request_of(spec) for spec in specs if input_files(spec)]
        plain = [to_mapping(spec) for spec in specs if not input_files(spec)]
        answers = []
        if plain:
            content = "".join(json.dumps(line) + "\n" for line in plain).encode()
            kind = {"Content-Type": "application/jsonl"}
            batch = self._call("POST", "/v1/batches", content=content, headers=kind, timeout=SUBMIT_S)
            answers.append(batch)
        for number, request in enumerate(single):
            try:
                answers.append(self._call("POST", "/v1/jobs", json=request))
            except GfgenError as error:
                num_accepted = len(plain) + number
                if not num_accepted:
                    raise
                taken = f"the server has accepted {counted(num_accepted, 'job')} before"
                raise type(error)(f"{error}; {taken}") from None
        ids = ", ".join(answer["id"] for answer in answers[:3]) + (", ..." if len(answers) > 3 else "")
        return Submitted(len(specs), f"{self._url} accepted {counted(len(specs), 'job')}: {ids}", (), answers)

    def _call(self, method: str, path: str, **asked: Any) -> dict[str, Any]:
        asked = {"timeout": TIMEOUT_S, **asked, "headers": self._headers | asked.get("headers", {})}
        try:
            answer = httpx.request(method, self._url + path, trust_env=self._asks_proxies, **asked)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = getattr(error.__cause__, "strerror", None) or str(error) or type(error).__name__
            text = f"{self._url}: no answer ({reason}); is 'gfgen serve' running there?"
            raise InputError(text + self._by_proxy) from None
        if not answer.is_success:
            raise self._refusal(answer)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._is_no_server()
        return found

    def _refusal(self, answer: httpx.Response) -> GfgenError:
        status = answer.status_code
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return self._is_no_server(f", which answers with status {status}")
        if status == 401:
            message = "the key is missing or wrong; give --api-key, or set GFGEN_API_KEY"
        kind = RunError if status in (429, 503, 507) else InputError
        return kind(f"{self._url}: {message}")

    def _is_no_server(self, how: str = "") -> InputError:
        text = f"{self._url}: is no gfgen server{how}; name the URL that 'gfgen serve' prints"
        return InputError(text + self._by_proxy)


def _matches(job: Mapping[str, Any], pattern: str) -> bool:
    """Whether a pattern means this job: its id, its id in the job file, or its batch."""
    if _EXACT.fullmatch(pattern):
        return pattern in (job["id"], job["batch_id"])
    return any(fnmatchcase(name, pattern) for name in (job["id"], job["custom_id"]) if name)


def _request_of(spec: JobSpec) -> dict[str, Any]:
    line = to_mapping(spec)
    if "lora" in line:
        raise InputError(f"{spec.id}: lora: files of LoRAs cannot be sent to a server")
    request = {name: value for name, value in line.items() if name not in _OWN}
    request["seed"] = default_seed(spec.id) if spec.seed is None else spec.seed
    if spec.image is not None:
        request["image"] = _data_url(spec, spec.image)
    if spec.files is not None:
        request["files"] = {
            name: [_data_url(spec, path) for path in paths]
            if isinstance(paths, list)
            else _data_url(spec, paths)
            for name, paths in spec.files.items()
        }
    return request


def _data_url(spec: JobSpec, path: str) -> str:
    if is_video(path):
        raise InputError(f"{spec.id}: {path}: send videos as a form (docs/serving.md)")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{spec.id}: {path}: cannot be read ({error.strerror})") from None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _job_row(job: Mapping[str, Any], *, is_running: bool) -> dict[str, Any]:
    layout = job["layout"] or {"ranks": []}
    return {
        "id": job["id"],
        "name": job["custom_id"],
        "state": "running" if is_running else "waiting",
        "stage": job["stage"],
        "step": job["step"],
        "steps": job["steps"],
        "ranks": layout["ranks"] if is_running else [],
        "ends_at": job["predicted_completion_at"],
        "deadline_at": job["deadline_at"],
        "is_late": job["will_meet_deadline"] is False,
    }


def _rank_row(rank: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    task = rank["task"] or {"job_id": None, "stage": None}
    return {
        "rank": rank["rank"],
        "node": rank.get("node"),
        "state": rank["status"],
        "job": task["job_id"],
        "name": names.get(task["job_id"]),
        "stage": task["stage"],
    }


def _recent_row(job: Mapping[str, Any]) -> dict[str, Any]:
    ended_at = job["completed_at"] or job["created_at"]
    return {
        "id": job["id"],
        "name": job["custom_id"],
        "status": "done" if job["status"] == "completed" else job["status"],
        "ended_at": float(ended_at),
        # Clients get whole seconds, so a short job's latency is that without the queue.
        "latency_s": max(float(ended_at - job["created_at"]), job["inference_time_s"] or 0.0),
        "error": (job["error"] or {}).get("message"),
    }
