"""`gfgen serve` as a user starts it, with tiny models; and command lines that it refuses."""

from __future__ import annotations

import io
import socket
import time
from types import SimpleNamespace

import pytest
from PIL import Image
from serving import Server, free_port

from gfgen.cli.main import main
from gfgen.cli.serve import Arguments, _checked_keys, usual_jobs
from gfgen.job.recipes import recipes
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.admission import admit
from gfgen.runtime.core.devices import Devices
from gfgen.runtime.files.lock import hold_folder
from gfgen.runtime.predict.job_bounds import JobBounds, StepTimes, beyond
from gfgen.server.jobs.job_requests import batch_jobs, plain_job, video_job
from gfgen.server.protocol.problems import checked
from gfgen.server.protocol.schemas import JobRequest, VideoRequest
from gfgen.server.protocol.server_schemas import served_model
from gfgen.session.admission import find_weightless
from gfgen.session.ranks import Ranks


def served(folder, port):
    command = ["-m", "gfgen", "serve", "--port", str(port), "--ranks", "2", "--output", "out"]
    command += ["--model", "tiny-wan", "--model", "tiny-qwen-image", "--memory", "18MB", "--max-frames", "12"]
    return Server(command, port=port, folder=folder)


def test_pictures_and_videos_are_made_and_a_stop_costs_nothing(tmp_path, tiny_models):
    port = free_port()
    (tmp_path / "gfgen.toml").write_text("[recipes.mine.wan]\nsteps = 3\n")
    server = served(tmp_path, port)
    early = server.http
    deadline_s = time.monotonic() + 30
    while True:  # it answers while it loads
        try:
            loading = early.get("/ready")
            break
        except Exception:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    assert loading.status_code == 503
    assert loading.json()["error"]["message"] == "the models are loading"
    assert early.post("/v1/videos", json={"prompt": "x"}).status_code == 503
    assert early.get("/health").status_code == 503
    server.wait_ready()
    warning = "--max-pixels is below a default of tiny-wan: jobs without it have frames = 9"
    assert warning in server.log
    plain = server.post("/v1/videos", prompt="x", size="64x64", num_inference_steps=1).json()
    assert plain["frames"] == 9
    values = {"prompt": "a fox", "size": "64x64", "num_inference_steps": 2, "response_format": "url"}
    (image,) = server.post("/v1/images/generations", **values).json()["data"]
    with Image.open(io.BytesIO(server.http.get(image["url"]).content)) as picture:
        assert picture.size == (64, 64)
    values = {"prompt": "the sea", "size": "64x64", "seconds": "1", "num_inference_steps": 2}
    short = server.wait_for(server.post("/v1/videos", **values).json()["id"])
    assert (short["status"], short["model"], short["seconds"]) == ("completed", "tiny-wan", "1.125")
    movie = server.http.get(short["content_url"])
    assert movie.content[4:8] == b"ftyp"
    with Image.open(io.BytesIO(server.http.get(short["thumbnail_url"]).content)) as picture:
        assert picture.format == "WEBP"
    named = {"prompt": "the sea", "size": "64x64", "frames": 5, "recipe": "mine", "model": "tiny-wan"}
    assert server.wait_for(server.post("/v1/jobs", **named).json()["id"])["steps"] == 3
    other = server.post("/v1/jobs", **named | {"recipe": "mien"})
    assert (other.status_code, "did you mean mine?" in other.text) == (400, True)
    long = server.post("/v1/videos", **values | {"num_inference_steps": 150}).json()["id"]
    while server.job(long)["step"] < 3:
        time.sleep(0.05)
    assert server.stop() == 0
    assert "1 job is open and continues at the next start" in server.log
    assert "not all models fit together: they take turns, tiny-wan first" in server.log

    again = served(tmp_path, port)
    try:
        again.wait_ready()
        assert again.wait_for(long, "in_progress", "completed")["step"] >= 3
        assert again.wait_for(long)["status"] == "completed"
        assert again.job(short["id"])["status"] == "completed"
    finally:
        assert again.stop() == 0


def refused(capsys, *arguments):
    """The message of a command line that ends at once, and its exit code."""
    with pytest.raises(SystemExit) as end:
        main(["serve", "--device", "cpu", *arguments])
    return capsys.readouterr().err, end.value.code


def test_models_memory_and_warming_up_are_options_as_of_a_run(monkeypatch):
    given = []
    monkeypatch.setattr("gfgen.cli.serve.serve_models", given.append)
    for arguments in ((), ("--memory", "40GB", "--graphs"), ("--no-graphs",)):
        with pytest.raises(SystemExit) as end:
            main(["serve", "--device", "cpu", *arguments])
        assert not end.value.code
    found = [(options.ranks.devices.memory_limit, options.ranks.has_graphs) for options in given]
    assert found == [(None, True), (40 * 10**9, True), (None, False)]
    assert {options.models for options in given} == {("shapes",)}


def test_bounds_of_one_job_are_options_with_defaults_that_admit_what_models_are_made_for(monkeypatch):
    given = []
    monkeypatch.setattr("gfgen.cli.serve.serve_models", given.append)
    for arguments in (
        (),
        ("--max-pixels", "99", "--max-frames", "9", "--max-steps", "8", "--max-step-time", "1h"),
    ):
        with pytest.raises(SystemExit):
            main(["serve", "--device", "cpu", *arguments])
    usual, own = [options.job_bounds for options in given]
    assert own == JobBounds(pixels=99, frames=9, steps=8, step_s=3600.0)
    assert usual.step_s == 600.0
    specs = [
        JobSpec(id="t2v", prompt="a fox", model="wan2.2-t2v-a14b", width=1280, height=720, frames=121),
        JobSpec(id="ti2v", prompt="a fox", model="wan2.2-ti2v-5b"),
        JobSpec(id="picture", prompt="a fox", model="qwen-image", width=2048, height=2048),
        JobSpec(id="wide", prompt="a fox", model="qwen-image", width=1664, height=928, steps=50),
    ]
    jobs, problems = admit(specs, default_model="shapes", find_model=find_weightless)
    assert not problems
    on_a_gpu = StepTimes(None, kind="cuda", num_ranks=1)
    assert list(beyond(jobs, usual, on_a_gpu)) == []


@pytest.mark.parametrize("most", [12, 1])
def test_a_limit_below_the_default_of_a_model_is_the_default(tiny_models, most):
    """It refused every request that named no length. Wan makes 13 frames of 12, which are too many."""
    admit = Ranks(Devices("cpu", 1)).admission("tiny-wan", bounds=JobBounds(frames=most))
    own = admit.models.find("tiny-wan").geometry.resolve(JobSpec(id="x", prompt="a fox")).frames
    model = served_model(admit.models.find("tiny-wan"), created=1, bounds=JobBounds(frames=most))
    assert own > 12
    frames = {12: 9, 1: 1}[most]
    assert "limited" not in model.model_dump_json()
    requests = [
        video_job(checked(VideoRequest, {"prompt": "a fox"}), models=[model], ignored=None),
        plain_job(checked(JobRequest, {"prompt": "a fox"}), uploads={}, models=[model]),
        *batch_jobs(
            b'{"prompt": "a fox"}',
            suffix=".jsonl",
            max_jobs=1,
            batch_id="b",
            skip_invalid=False,
            models=[model],
        )[0],
    ]
    jobs, problems = admit([request.spec for request in requests])
    assert (list(problems), [job.spec.frames for job in jobs]) == ([], [frames] * 3)
    assert [request.spec.frames for request in requests] == [frames] * 3, "as it is stored for a restart"
    (usual,) = usual_jobs([model], admit)
    assert usual.shape == jobs[0].shape
    roomy = JobBounds(frames=257, steps=200, pixels=2048 * 2048)
    assert served_model(admit.models.find("tiny-wan"), created=1, bounds=roomy).limited == {}


def test_a_server_without_loras_offers_no_recipe_that_needs_one(tiny_models, monkeypatch):
    """The page offered lightning-4, and each job with it was refused."""
    monkeypatch.setitem(recipes(), "quick", {"wan": {"steps": 3}})
    model = Ranks(Devices("cpu", 1)).admission("tiny-wan").models.find("tiny-wan")
    assert served_model(model, created=1).recipes == ["quick"]
    has_loras = served_model(model, created=1, patches=["ink"])
    assert (has_loras.recipes, has_loras.patches) == (["lightning-4", "quick"], ["ink"])


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-qwen-image", "shapes"])
def test_limits_of_steps_and_pixels_below_the_defaults_of_a_model_are_defaults(tiny_models, name):
    """They refused every request that named neither."""
    bounds = JobBounds(steps=3, pixels=64 * 40)
    admit = Ranks(Devices("cpu", 1)).admission(name, bounds=bounds)
    model = served_model(admit.models.find(name), created=1, bounds=bounds)
    assert model.defaults.steps == 3
    requests = [
        plain_job(checked(JobRequest, {"prompt": "a fox"} | more), uploads={}, models=[model])
        for more in ({}, {"sigmas": [1.0, 0.5]}, {"size": "32x32"})
    ]
    jobs, problems = admit([request.spec for request in requests])
    assert not problems
    assert [job.spec.steps for job in jobs] == [3, 2, 3]
    assert all(1024 <= job.spec.width * job.spec.height <= 64 * 40 for job in jobs)
    assert model.defaults.size == jobs[0].spec.size_text
    with_recipe = checked(JobRequest, {"prompt": "a fox", "recipe": {"*": {"steps": 2}}})
    assert plain_job(with_recipe, uploads={}, models=[model]).spec.steps is None


def test_what_is_warmed_up_is_what_a_request_gets_that_says_nothing(tiny_models):
    admit = Ranks(Devices("cpu", 1)).admission("tiny-wan")
    names = ["tiny-wan", "tiny-qwen-image", "tiny-wan-moe-i2v"]
    jobs = usual_jobs([served_model(admit.models.find(name), created=1) for name in names], admit)
    shapes = {job.spec.model: (job.spec.width, job.spec.height) for job in jobs}
    assert shapes.keys() == {"tiny-wan", "tiny-qwen-image"}  # the last one wants a picture
    assert all(width and height for width, height in shapes.values())


def test_free_memory_is_read_once_for_requests_that_come_together(monkeypatch, tiny_models):
    """From about twenty files, which took a fifth of a request."""
    reads, now_s = [], 100.0
    found = Ranks(Devices("cpu", 1)).admission("tiny-wan")
    admit = found.of_loaded(frozenset({found.models.find("tiny-wan").checkpoint}))
    monkeypatch.setattr("gfgen.session.memory.available_bytes", lambda: reads.append(now_s) or 10**12)
    monkeypatch.setattr("gfgen.session.memory.time", SimpleNamespace(monotonic=lambda: now_s))
    for step_s in (0.0, 0.1, 0.1, 0.1):
        now_s += step_s
        assert not admit([JobSpec(id="a", prompt="a fox", model="tiny-wan")])[1]
    assert reads == [100.0, pytest.approx(100.3)]


def test_what_was_accepted_is_held_against_limits_and_not_against_what_is_free_now(monkeypatch, tiny_models):
    monkeypatch.setattr("gfgen.session.memory.available_bytes", lambda: 10)
    spec = JobSpec(id="a", prompt="a fox", model="tiny-wan")

    def admission(limit):
        found = Ranks(Devices("cpu", 1, memory_limit=limit)).admission("tiny-wan")
        return found.of_loaded(frozenset({found.models.find("tiny-wan").checkpoint}))

    unlimited, limited = admission(None), admission(20)
    assert [len(part) for part in unlimited([spec])] == [0, 1]
    assert [len(part) for part in unlimited.again([spec])] == [1, 0]
    _, (problem,) = limited.again([spec])
    assert problem.field == "size"
    _, (problem,) = unlimited.again([JobSpec(id="a", prompt="a fox", model="tiny-wam")])
    assert problem.field == "model"


def test_names_and_addresses_for_clients_are_options(monkeypatch, capsys):
    given = []
    monkeypatch.setattr("gfgen.cli.serve.serve_models", given.append)
    with pytest.raises(SystemExit):
        main(["serve", "--device", "cpu", "--served-model-name", "sora-2=shapes", "--strict"])
    with pytest.raises(SystemExit):
        main(["serve", "--device", "cpu", "--public-url", "https://a.example/gf/", "--allow-origin", "*"])
    named, public = [options.front.api for options in given]
    assert (named.aliases, named.strict, named.root_path) == ({"sora-2": "shapes"}, True, "")
    assert (public.public_url, public.root_path) == ("https://a.example/gf", "/gf")
    assert public.allowed_origins == ("*",)
    for option, value in (
        ("--served-model-name", "sora-2=other"),
        ("--served-model-name", "sora-2"),
        ("--root-path", "films"),
        ("--public-url", "a.example"),
        ("--allow-origin", "https://a.example/path"),
        ("--host", "localhost:3000"),
    ):
        message, code = refused(capsys, option, value)
        assert (code, option in message) == (2, True)


def test_an_open_address_needs_a_key_or_an_explicit_word(capsys, caplog):
    _checked_keys(Arguments(no_key=True, api_key="of 8 and more"))
    assert "--no-key has no effect" in caplog.text
    message, code = refused(capsys, "--host", "0.0.0.0")
    assert code == 2
    assert "--no-key to allow requests without a key" in message
    message, code = refused(capsys, "--host", "0.0.0.0", "--api-key", "short")
    assert (code, "8 characters" in message) == (2, True)


@pytest.mark.parametrize("key", ["schl\u00fcssel", "a key\nof two lines", " with spaces "])
def test_a_key_that_no_header_can_bring_is_refused(capsys, key):
    message, code = refused(capsys, "--api-key", key)
    assert code == 2
    assert "--api-key: give printable ASCII" in message
    assert key not in message


def test_an_address_that_is_in_use_is_told(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("gfgen.server.bridge.BIND_S", 0.1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        message, code = refused(capsys, "--port", str(other.getsockname()[1]), "--output", str(tmp_path))
    assert code == 2
    assert "cannot listen there (Address already in use)" in message


def test_the_folder_of_a_run_is_refused_because_its_stopped_jobs_would_begin_again(capsys, tmp_path):
    (tmp_path / "journal.jsonl").touch()
    message, code = refused(capsys, "--port", str(free_port()), "--output", str(tmp_path))
    assert code == 2
    assert "contains files of a run; name another folder" in message


def test_a_folder_that_another_run_holds_is_left_alone(capsys, tmp_path):
    with hold_folder(tmp_path):
        message, code = refused(capsys, "--port", str(free_port()), "--output", str(tmp_path))
    assert code == 75
    assert "is in use by another run" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "x"), "unknown"),
        (("--keep", "soon"), "a duration like 30s, 12h or 7d"),
        (("--keep-bytes", "much"), "a size like 40GB"),
        (("--keep-bytes", "0"), "'0': a size like 40GB"),
        (("--max-body", "-1"), "'-1': a size like 40GB"),
        (("--max-body", "inf"), "'inf': a size like 40GB"),
        (("--max-body", "nan"), "'nan': a size like 40GB"),
        (("--max-body", "5kk"), "'5kk': a size like 40GB"),
        (("--max-open", "0"), "0 is not in the range"),
        (("--lookahead", "nan"), "nan is not a finite number"),
    ],
)
def test_options_that_mean_nothing_are_refused(capsys, arguments, words):
    message, code = refused(capsys, *arguments)
    assert code == 2
    assert words in message


def test_a_model_that_is_not_there_ends_the_start_with_one_line(capsys, tmp_path):
    options = ("--port", str(free_port()), "--output", str(tmp_path), "--model", "tiny-wam")
    message, code = refused(capsys, *options)
    assert code == 2
    assert "tiny-wam" in message
