"""Stores and shards: what happens to finished jobs, whatever fails on the way."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import shutil
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from acted_run import job_info
from object_store import BUCKET, SECRETS, FaultyProxy, environment

from gfgen.errors import InputError, LockedError, OutputError
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.manifest import read_manifest
from gfgen.runtime.publish import publisher as publishing
from gfgen.runtime.publish import shards
from gfgen.runtime.publish import store as stores
from gfgen.runtime.publish.publisher import Publisher
from gfgen.runtime.publish.shards import Shards, lines_of

s3fs = pytest.importorskip("s3fs", reason="object stores: pip install 'gfgen[data]'")
NAMES = itertools.count()


class KilledError(BaseException):
    """In place of a SIGKILL: nobody catches it."""


@pytest.fixture
def proxy(store_port: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(store_port).running() as proxy:
        yield proxy


@pytest.fixture
def url(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of its own, behind the proxy."""
    for name, value in environment(proxy.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "TIMEOUT_S", 5)
    return f"s3://{BUCKET}/run-{next(NAMES)}"


@pytest.fixture(autouse=True)
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "PAUSE_S", 0.01)


def shards_of(kind: str | None = "webdataset", size: str = "2") -> Shards:
    return Shards.of(kind, size)


def make(
    state: Path, job_id: str, *, names: Sequence[str] = (), status: str = "done", decision: str | None = None
) -> None:
    """What a run leaves of a job that has ended, and that a filter has judged."""
    state.mkdir(exist_ok=True)
    files = []
    for name in names or [f"{job_id}.png"]:
        content = f"picture {name}".encode()
        (state / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        files.append({"file": name, "size_bytes": len(content), "sha256": digest})
    shape = {"width": 64, "height": 64, "frames": None, "fps": None}
    line = {"version": 1, "id": job_id, "status": status, **files[0], "prompt": "a fox", "seed": 1}
    line |= {"spec_hash": f"hash of {job_id}", "shape": shape}
    line |= {"outputs": files} if len(files) > 1 else {}
    line |= {} if decision is None else {"filter": {"decision": decision}}
    with (state / "manifest.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def publish(
    url: str, state: Path, shards: Shards, jobs: Sequence[str] = (), *, limit_s: float = 60.0
) -> Publisher:
    """A run that makes those of the jobs that are not in the store, nor finished here."""
    state.mkdir(exist_ok=True)
    publisher = Publisher(url, state, shards)
    with publisher.opened():
        publisher.expect([replace(job_info(each), spec_hash=f"hash of {each}") for each in jobs])
        here = {path.stem for path in state.glob("*.png")}
        for job_id in jobs:
            if job_id not in publisher.published and job_id not in here:
                make(state, job_id)
                publisher.ended(JobOutcome(job_info(job_id), "done"))
        if left := publisher.finish(limit_s=limit_s):
            raise OutputError(left)
    return publisher


def fetched(url: str, folder: Path) -> dict[str, Path]:
    """The objects of a store, by name."""
    if "://" not in url:
        return {path.name: path for path in sorted(Path(url).iterdir())}
    folder.mkdir()
    for name in (found := stores.Bucket(url)).names(""):
        found.fetch(name, folder / name)
    return {path.name: path for path in sorted(folder.iterdir()) if path.name != stores.LEASE_NAME}


def ids_in(paths: dict[str, Path], beginning: str) -> list[str]:
    chosen = [path for name, path in paths.items() if name.startswith(beginning)]
    return [line["id"] for path in chosen for line in lines_of(path) if line["status"] == "done"]


JOBS = ["a.fox", "b", "c", "d", "e"]


def test_shards_have_each_job_once_and_the_folder_keeps_no_picture(url: str, tmp_path: Path) -> None:
    import webdataset

    state = tmp_path / "state"
    publish(url, state, shards_of(), JOBS)
    found = fetched(url, tmp_path / "found")
    tars = [name for name in found if name.endswith(".tar")]
    assert tars == ["shard-00000.tar", "shard-00001.tar", "shard-00002.tar"]
    with warnings.catch_warnings(action="ignore"):  # it leaves files to the garbage collection
        samples = list(webdataset.WebDataset([str(found[name]) for name in tars], shardshuffle=False))
        gc.collect()
    assert [sample["__key__"] for sample in samples] == ["a~fox", "b", "c", "d", "e"]
    assert samples[0]["png"] == b"picture a.fox.png"
    said = json.loads(samples[0]["json"])
    assert (said["id"], said["shard"], said["job"]["prompt"]) == ("a.fox", tars[0], "a fox in the snow")
    parts = [line for name in found if "manifest" in name for line in lines_of(found[name])]
    assert [(line["id"], line["shard"]) for line in parts] == list(
        zip(JOBS, [tars[0]] * 2 + [tars[1]] * 2 + [tars[2]], strict=True)
    )
    assert not list(state.glob("*.png"))
    assert not list((state / ".shards").iterdir())


def test_rows_of_parquet_have_the_bytes_of_pictures(url: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    state = tmp_path / "state"
    publish(url, state, shards_of("parquet", "10"), ["a"])
    make(state, "several", names=["several-1.png", "several-2.png"])
    publish(url, state, shards_of("parquet", "10"))
    found = fetched(url, tmp_path / "found")
    (first,) = parquet.read_table(found["shard-00000.parquet"]).to_pylist()
    assert (first["id"], first["bytes"], first["width"]) == ("a", b"picture a.png", 64)
    assert json.loads(first["job"])["prompt"] == "a fox in the snow"
    assert json.loads(first["manifest"])["spec_hash"] == "hash of a"
    (second,) = parquet.read_table(found["shard-00001.parquet"]).to_pylist()
    assert second["more_files"] == [{"file": "several-2.png", "bytes": b"picture several-2.png"}]
    assert ids_in(found, "shard") == ["a", "several"]


def test_all_files_of_jobs_count_in_the_size_of_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(shards, "GROUP_BYTES", 50)
    for job_id in ("a", "b"):
        make(tmp_path, job_id, names=[f"{job_id}-{number}.png" for number in range(4)])
    lines = read_manifest(tmp_path / "manifest.jsonl").values()
    shards_of("parquet", "10").write(tmp_path / "shard.parquet", lines, tmp_path)
    assert parquet.ParquetFile(tmp_path / "shard.parquet").num_row_groups == 3, "the last one is empty"


def test_without_shards_files_have_their_names(url: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    make(state, "several", names=["several-1.png", "several-2.png"])
    make(state, "bad", status="failed")
    with pytest.raises(InputError, match="has files of runs without shards or a store"):
        publish(url, state, shards_of(None))
    shutil.rmtree(state)
    publish(url, state, shards_of(None), ["a"])
    make(state, "several", names=["several-1.png", "several-2.png"])
    make(state, "bad", status="failed")
    publish(url, state, shards_of(None))
    found = fetched(url, tmp_path / "found")
    names = ["a.png", "manifest-00000.jsonl", "manifest-00001.jsonl", "several-1.png", "several-2.png"]
    assert list(found) == names
    lines = list(lines_of(found["manifest-00001.jsonl"]))
    assert [(line["id"], line["status"]) for line in lines] == [("several", "done"), ("bad", "failed")]
    assert not list(state.glob("*.png")) or (state / "bad.png").exists()


@pytest.mark.parametrize("kind", ["webdataset", None])
def test_a_job_that_failed_is_in_the_next_part_once(url: str, tmp_path: Path, kind: str | None) -> None:
    state = tmp_path / "state"
    publish(url, state, shards_of(kind), ["a"])
    make(state, "bad", status="failed")
    publish(url, state, shards_of(kind))
    publish(url, state, shards_of(kind), ["b"])
    publish(url, state, shards_of(kind), ["c"])
    found = fetched(url, tmp_path / "found")
    parts = [line["id"] for name in found if "manifest" in name for line in lines_of(found[name])]
    assert Counter(parts) == {"a": 1, "b": 1, "bad": 1, "c": 1}


def killing(patch: pytest.MonkeyPatch, place: int) -> None:
    """Let nothing that lasts happen from some place on, before or after one of these actions."""
    count = itertools.count()

    def kill() -> None:
        if next(count) >= place:
            raise KilledError

    def wrapped(action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **options: Any) -> Any:
            kill()
            result = action(*given, **options)
            kill()
            return result

        return act

    actions = [(Publisher, "_record"), (Publisher, "_remove"), (Publisher, "_write_lines")]
    for owner, name in (*actions, (Shards, "write"), (stores.Folder, "put")):
        patch.setattr(owner, name, wrapped(getattr(owner, name)))
    # Without a thread, which could not be killed.
    patch.setattr(Publisher, "expect", lambda publisher, jobs: None)
    patch.setattr(Publisher, "finish", lambda publisher, **_: publisher._publish(is_last=True))


@pytest.mark.parametrize("kind", ["webdataset", "parquet", None])
@pytest.mark.parametrize("is_lost", [False, True], ids=["with its folder", "without its folder"])
def test_a_killed_run_goes_on_and_has_each_job_once(tmp_path: Path, kind: str | None, is_lost: bool) -> None:
    """At every action: the next run, here or on another machine, ends with each job in one shard."""
    for place in itertools.count():
        store, state, was_killed = tmp_path / f"store-{place}", tmp_path / f"state-{place}", False
        store.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            killing(patch, place)
            try:
                publish(str(store), state, shards_of(kind), JOBS[:3])
            except KilledError:
                was_killed = True
        if is_lost:
            shutil.rmtree(state)
        publish(str(store), state, shards_of(kind), JOBS)
        found = fetched(str(store), tmp_path)
        once = dict.fromkeys(JOBS, 1)
        if kind is None:
            assert [name for name in found if name.endswith(".png")] == [f"{job}.png" for job in JOBS]
        else:
            assert Counter(ids_in(found, "shard")) == once, place
        assert Counter(ids_in(found, "manifest")) == once, place
        assert not list(state.glob("*.png"))
        if not was_killed:
            break
    assert place > 20


@pytest.mark.parametrize("kind", ["webdataset", None])
@pytest.mark.parametrize("fault", ["fails", "is lost", "has no answer", "is late"])
def test_requests_that_go_wrong_cost_no_job_and_double_none(
    proxy: FaultyProxy, url: str, tmp_path: Path, kind: str | None, fault: Any
) -> None:
    tries: Counter[str] = Counter()

    def first_try(method: str, path: str) -> Any:
        tries[path] += 1
        return fault if method == "PUT" and "lease" not in path and tries[path] == 1 else None

    proxy.fault = first_try
    publish(url, tmp_path / "state", shards_of(kind), JOBS)
    found = fetched(url, tmp_path / "found")
    assert Counter(ids_in(found, "manifest")) == dict.fromkeys(JOBS, 1)
    if kind is not None:
        assert Counter(ids_in(found, "shard")) == dict.fromkeys(JOBS, 1)


def test_a_store_that_fails_for_good_keeps_all_here_in_one_line(
    proxy: FaultyProxy, url: str, tmp_path: Path
) -> None:
    proxy.fault = lambda method, path: "fails" if method == "PUT" and "shard" in path else None
    state = tmp_path / "state"
    with pytest.raises(OutputError, match=r"other files stay in .*: run the same command again") as failed:
        publish(url, state, shards_of(), JOBS, limit_s=0.1)
    assert "\n" not in str(failed.value)
    assert len(list(state.glob("*.png"))) == 5
    proxy.fault = lambda method, path: None
    publish(url, state, shards_of())
    assert Counter(ids_in(fetched(url, tmp_path / "found"), "shard")) == dict.fromkeys(JOBS, 1)


def test_a_disk_that_is_full_for_a_while_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tries = Shards.write, itertools.count()

    def sometimes(*given: Any) -> None:
        if next(tries) % 2 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given)

    monkeypatch.setattr(Shards, "write", sometimes)
    publish(str(tmp_path / "out"), tmp_path / "out", shards_of(), JOBS)
    assert Counter(ids_in(fetched(str(tmp_path / "out"), tmp_path), "shard")) == dict.fromkeys(JOBS, 1)


def test_a_later_run_reads_the_manifest_from_the_last_batch_on(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for job_id in JOBS:
        publish(str(folder), folder, shards_of(), [job_id])
    later = Publisher(str(folder), folder, shards_of())
    with later.opened():
        assert not later._waiting
    lines = (folder / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    assert later._start_bytes == sum(map(len, lines[:-1]))


def test_two_runs_at_once_share_the_numbers_of_shards(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a lease had expired under a run that still writes."""
    monkeypatch.setattr(stores.Bucket, "hold", lambda *given, **options: None)
    first = Publisher(url, tmp_path / "first", shards_of(size="1"))
    second = Publisher(url, tmp_path / "second", shards_of(size="1"))
    for state in ("first", "second"):
        (tmp_path / state).mkdir()
    with first.opened(), second.opened():
        for job_id in JOBS:
            for each in (first, second):
                make(each.state, job_id)
                each._publish(is_last=False)
    found = fetched(url, tmp_path / "found")
    assert Counter(ids_in(found, "shard")) == Counter(ids_in(found, "manifest")) == dict.fromkeys(JOBS, 1)
    assert not list(tmp_path.glob("*/*.png"))


def test_an_object_of_another_name_stays_and_its_job_too(url: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"not ours")
    stores.Bucket(url).put("b.png", other, stores.content_of(other))
    state = tmp_path / "state"
    with pytest.raises(
        OutputError, match=r"/b\.png is there already, with another content; other files stay"
    ):
        publish(url, state, shards_of(None), ["a", "b"])
    found = fetched(url, tmp_path / "found")
    assert found["b.png"].read_bytes() == b"not ours"
    assert ids_in(found, "manifest") == []
    assert [path.name for path in sorted(state.glob("*.png"))] == ["a.png", "b.png"]


def test_a_name_that_others_have_is_told_before_the_run_and_that_of_the_same_job_is_none(
    url: str, tmp_path: Path
) -> None:
    other, state = tmp_path / "other", tmp_path / "state"
    other.write_bytes(b"not ours")
    for name, job in (("a.mp4", "hash of a"), ("b.mp4", "hash of another")):
        stores.Bucket(url).put(name, other, stores.content_of(other), job=job)
    publish(url, state, shards_of(None), ["a"])
    with pytest.raises(InputError, match=r"/b\.mp4 is there already, of another job; move it away"):
        publish(url, state, shards_of(None), ["b"])
    assert not list(state.glob("b.*"))


def test_a_folder_has_shards_too(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    publish(str(folder), folder, shards_of(), JOBS)
    found = {path.name: path for path in sorted(folder.iterdir())}
    assert Counter(ids_in(found, "shard")) == dict.fromkeys(JOBS, 1)
    assert publish(str(folder), folder, shards_of()).published.keys() == set(JOBS)
    with pytest.raises(InputError, match=r"run with -o \S+/out and --shards webdataset"):
        publish(str(folder), folder, shards_of("parquet"))


def test_a_lease_keeps_other_runs_out_until_it_expires(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = stores.Bucket(url), stores.Bucket(url)
    one.hold("one", lease_s=60)
    with pytest.raises(
        LockedError, match=r"is in use by another run \(process \d+ on .*wait for it"
    ) as locked:
        other.hold("other", lease_s=60)
    assert locked.value.exit_code == 75
    one.hold("one", lease_s=60)
    stores.Bucket(url).hold("one", lease_s=60)  # it was killed, and has come back
    one.hold("one", lease_s=0)
    other.hold("other", lease_s=-1)
    one.hold("one", lease_s=60)
    with pytest.raises(LockedError):
        other.hold("other", lease_s=60)


def test_a_renewal_without_an_answer_is_one(proxy: FaultyProxy, url: str) -> None:
    one = stores.Bucket(url)
    one.hold("one", lease_s=60)
    proxy.fault = lambda method, path: "has no answer" if method == "PUT" else None
    with pytest.raises(stores.StoreError):
        one.hold("one", lease_s=60)
    proxy.fault = lambda method, path: None
    one.hold("one", lease_s=60)
    one.hold("one", lease_s=60)


def test_a_store_that_replaces_objects_is_refused(proxy: FaultyProxy, url: str) -> None:
    proxy.fault = lambda method, path: "forgets its condition"
    with pytest.raises(InputError, match="this store replaces objects in spite of If-None-Match"):
        stores.Bucket(url).hold("one", lease_s=60)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (f"s3://{BUCKET}-missing/x", "there is no such bucket"),
        (f"s3://{BUCKET}/kinds", "give the --shards of it"),
    ],
)
def test_what_does_not_go_together_is_one_line(url: str, tmp_path: Path, where: str, said: str) -> None:
    if "kinds" in where:
        publish(where, tmp_path / "before", shards_of(), ["a"])
    with pytest.raises(InputError, match=said):
        publish(where, tmp_path / "state", shards_of(None), ["a"])


def test_a_store_without_keys_says_what_to_set(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nowhere")
    text = "Unable to locate credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET"
    with pytest.raises(stores.StoreError, match=text):  # which a run that has begun tries again
        stores.Bucket(url).names("")


def test_errors_have_no_keys(proxy: FaultyProxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = SECRETS["AWS_ACCESS_KEY_ID"]
    proxy.fault = lambda method, path: "fails"
    monkeypatch.setattr(
        stores, "in_one_line", lambda error: f"{key} at http://user:pw@host/x?X-Amz-Signature=1 "
    )
    with pytest.raises(stores.StoreError) as failed:
        stores.Bucket(url).names("")
    assert str(failed.value).rstrip().endswith("$AWS_ACCESS_KEY_ID at http://host/x")


@pytest.mark.parametrize(
    ("size", "said"),
    [("0", "jobs, bytes or both"), ("1,2", "jobs, bytes or both"), ("x", "a size like 40GB")],
)
def test_a_size_of_shards_is_checked(size: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Shards.of("webdataset", size)
    assert Shards.of("webdataset", "100,1GB") == Shards("webdataset", 100, 10**9)


def test_a_result_waits_for_the_decision_of_a_filter(tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def goes_on(*jobs: str) -> dict[str, Path]:
        publisher = Publisher(str(folder), folder, shards_of(size="1"), is_filtered=True)
        with publisher.opened():
            for job_id in jobs:
                make(folder, job_id)
            publisher._publish(is_last=True)
        return fetched(str(folder), folder)

    folder.mkdir()
    assert not ids_in(goes_on("a", "b", "c"), "shard")
    make(folder, "b", status="dropped", decision="drop")
    (folder / "b.png").unlink()
    make(folder, "c", decision="keep")
    found = goes_on()
    assert ids_in(found, "shard") == ["c"]
    part = [(line["id"], line["status"]) for line in lines_of(found["manifest-00000.jsonl"])]
    assert part == [("c", "done"), ("b", "dropped")]
    make(folder, "a", decision="keep")
    assert ids_in(goes_on(), "shard") == ["c", "a"]


def test_a_lost_folder_gets_its_manifest_back(tmp_path: Path) -> None:
    (store := tmp_path / "store").mkdir()
    state = tmp_path / "state"
    publish(str(store), state, shards_of(), ["a"])
    make(state, "b", status="dropped")
    publish(str(store), state, shards_of(), ["c"])
    before = read_manifest(state / "manifest.jsonl")
    shutil.rmtree(state)
    publish(str(store), state, shards_of(), ["d"])
    after = read_manifest(state / "manifest.jsonl")
    assert {name: line["status"] for name, line in after.items()} == {
        **{name: line["status"] for name, line in before.items()},
        "d": "done",
    }
    assert Counter(ids_in(fetched(str(store), store), "manifest")) == dict.fromkeys("acd", 1)


def test_a_changed_file_is_not_stored(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tmp_path / "state"
    publish(url, state, shards_of(), ["a"])
    make(state, "b")
    (state / "b.png").write_bytes(b"edited")
    publish(url, state, shards_of())
    assert (state / "b.png").read_bytes() == b"edited"
    assert "job b: its file has changed or is gone" in caplog.text
    assert ids_in(fetched(url, tmp_path / "found"), "shard") == ["a"]


def test_tars_are_equal_for_equal_jobs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        publish(str(tmp_path / name), tmp_path / name, shards_of(), ["a", "b"])
    one, two = (tmp_path / name / "shard-00000.tar" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_file_that_a_user_puts_under_an_old_name_stays(tmp_path: Path) -> None:
    publish(str(tmp_path), tmp_path, shards_of(), ["a"])
    (tmp_path / "a.png").write_bytes(b"my own")
    publish(str(tmp_path), tmp_path, shards_of())
    assert (tmp_path / "a.png").read_bytes() == b"my own"


@pytest.mark.parametrize("content", [b"no tar", None])
def test_shards_of_others_are_refused_and_stay(tmp_path: Path, content: bytes | None) -> None:
    shard, sample = tmp_path / "shard-00000.tar", tmp_path / "000.json"
    if content is None:
        sample.write_text('{"caption": "a fox"}')
        with tarfile.open(shard, "w") as archive:
            archive.add(sample, "000.json")
    else:
        shard.write_bytes(content)
    before = shard.read_bytes()
    with pytest.raises(InputError, match="which gfgen did not make"):
        publish(str(tmp_path), tmp_path, shards_of(), ["a"])
    assert shard.read_bytes() == before
    assert not [*tmp_path.glob("manifest-*")]


def test_a_folder_may_be_named_otherwise_or_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish("out", Path("out"), shards_of(), ["a"])
    Path("out").rename("moved")
    assert publish(str(tmp_path / "moved"), tmp_path / "moved", shards_of(), ["a", "b"]).published.keys() == {
        "a",
        "b",
    }
