"""Server-sent events: the life of a job, and the live state."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time

SLOW = {"flow_shift": 0.03, "num_inference_steps": 1000}


def made(server, **values):
    answer = server.post("/v1/videos", prompt="a fox", **values)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def test_a_job_tells_all_that_happens_to_it_in_order(server):
    job_id = made(server, num_inference_steps=5, deadline="1h")
    told = list(server.events(f"/v1/jobs/{job_id}/events"))
    kinds = [kind for _, kind, _ in told]
    assert kinds[0] == "queued"
    assert kinds[-1] == "completed"
    assert [data["step"] for _, kind, data in told if kind == "step"] == [1, 2, 3, 4, 5]
    stages = [data["stage"] for _, kind, data in told if kind in ("started", "stage")]
    assert stages == ["encode", "prepare", "denoise", "decode", "write"]
    numbers = [int(number.partition("-")[2]) for number, _, _ in told]
    assert numbers == list(range(1, len(told) + 1))
    progress = [data["progress"] for _, _, data in told]
    assert progress == sorted(progress)
    assert told[0][2]["position"] >= 1
    assert told[-1][2] | {"at": 0} == {
        "type": "completed",
        "at": 0,
        "job_id": job_id,
        "status": "completed",
        "progress": 100,
        "will_meet_deadline": True,
        "content_url": f"/v1/jobs/{job_id}/content",
    }


def test_a_reader_that_comes_back_misses_nothing_and_gets_nothing_twice(server):
    job_id = made(server, num_inference_steps=6)
    server.wait_for(job_id)
    whole = list(server.events(f"/v1/jobs/{job_id}/events"))
    for cut in (1, 4, len(whole) - 1):
        seen = whole[cut - 1][0]
        rest = list(server.events(f"/v1/jobs/{job_id}/events", **{"Last-Event-ID": seen}))
        assert rest == whole[cut:]
    anew = list(server.events(f"/v1/jobs/{job_id}/events", **{"Last-Event-ID": "999-3"}))
    assert anew == whole  # numbers of another life of the server mean nothing
    epoch = whole[0][0].partition("-")[0]
    spoilt = server.http.get(
        f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": f"{epoch}-\u00b2".encode("latin-1")}
    )
    assert (spoilt.status_code, spoilt.text.count("event: ")) == (200, len(whole))


def test_a_cancelled_job_ends_its_stream(server):
    job_id = made(server, **SLOW)
    kinds = []
    for _, kind, _ in server.events(f"/v1/jobs/{job_id}/events"):
        kinds.append(kind)
        if kind == "step" and kinds.count("step") == 2:
            server.http.delete(f"/v1/videos/{job_id}")
    assert kinds[-1] == "cancelled"


def test_changes_of_layout_are_told(server):
    server.post("/v1/policy", policy="fcfs,degree=2")
    try:
        job_id = made(server, num_inference_steps=3)
        layouts = [
            tuple(data["layout"]["ranks"])
            for _, kind, data in server.events(f"/v1/jobs/{job_id}/events")
            if kind in ("started", "layout")
        ]
        assert [len(ranks) for ranks in layouts] == [1, 2, 1]
    finally:
        server.post("/v1/policy", policy="srtf")


def merged(state, change):
    """A live state after a change, as the page puts it together."""
    state = {**state, **{k: v for k, v in change.items() if k not in ("open", "finished", "timeline")}}
    jobs = {job["id"]: job for job in [*state["open"], *change.get("open", [])]}
    if "order" in change:
        state["open"] = [jobs[job_id] for job_id in change["order"]]
    known = {job["id"] for job in change.get("finished", [])}
    stored = [job for job in state["finished"] if job["id"] not in known | set(change.get("removed", []))]
    state["finished"] = [*change.get("finished", []), *stored][:48]
    bars = {bar["key"]: bar for bar in [*state["timeline"], *change.get("timeline", [])]}
    state["timeline"] = list(bars.values())
    return state


def test_the_live_state_and_its_changes_are_the_state_of_the_end(server):
    seen = {}

    def follow():
        with server.http.stream("GET", "/v1/state/events") as answer:
            kind = None
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    data = json.loads(value)
                    seen["state"] = data if kind == "state" else merged(seen["state"], data)
                    seen.setdefault("kinds", []).append(kind)
                    done = {job["id"] for job in seen["state"]["finished"]}
                    if seen.get("wanted") and seen["wanted"] <= done and not seen["state"]["open"]:
                        return

    reader = threading.Thread(target=follow)
    reader.start()
    time.sleep(0.3)
    ids = [made(server, flow_shift=0.02, num_inference_steps=10) for _ in range(3)]
    ids.append(made(server, **SLOW))
    server.wait_for(ids[0])
    server.http.delete(f"/v1/videos/{ids[-1]}")
    seen["wanted"] = set(ids)
    reader.join(20)
    assert not reader.is_alive(), seen
    assert seen["kinds"][0] == "state"
    assert set(seen["kinds"][1:]) == {"change"}
    state, end = seen["state"], server.http.get("/v1/state").json()
    assert [job["id"] for job in state["finished"]] == [job["id"] for job in end["finished"]]
    assert state["finished"][: len(ids)] == end["finished"][: len(ids)]
    assert {rank["status"] for rank in end["ranks"]} == {"idle"}
    bars = {bar["key"]: bar for bar in state["timeline"]}
    mine = [bar for bar in end["timeline"] if bar["job_id"] in ids]
    assert mine
    assert all(bars[bar["key"]] == bar for bar in mine)


def test_a_bar_of_the_timeline_covers_consecutive_steps(server):
    job_id = made(server, num_inference_steps=8)
    server.wait_for(job_id)
    bars = [bar for bar in server.http.get("/v1/state").json()["timeline"] if bar["job_id"] == job_id]
    assert [bar["stage"] for bar in bars] == ["encode", "prepare", "denoise", "decode"]
    assert (bars[2]["first_step"], bars[2]["last_step"]) == (0, 7)
    assert all(bar["started_at"] <= bar["ended_at"] for bar in bars)
    assert all(one["ended_at"] <= other["started_at"] + 1e-3 for one, other in itertools.pairwise(bars))


def open_stream(server, path):
    """A connection of its own whose request is a stream, and the status line of the answer."""
    end = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    end.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return end, end.recv(4096).split(b"\r\n", 1)[0]


def num_streams(server):
    return server.http.get("/v1/state").json()["streams"]


def test_streams_are_bounded_and_given_back(server):
    job_id = made(server, **SLOW)
    ends = []
    try:
        statuses = []
        for number in range(14):
            path = "/v1/state/events" if number % 2 else f"/v1/jobs/{job_id}/events"
            end, status = open_stream(server, path)
            ends.append(end)
            statuses.append(status.split()[1])
        assert statuses.count(b"200") == 12
        assert statuses[-1] == b"429"
        answer = server.http.get("/v1/state/events")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    finally:
        for end in ends:
            end.close()
        server.http.delete(f"/v1/videos/{job_id}")
    deadline_s = time.monotonic() + 10
    while num_streams(server):
        assert time.monotonic() < deadline_s, "streams of clients that have gone are still counted"
        time.sleep(0.05)
