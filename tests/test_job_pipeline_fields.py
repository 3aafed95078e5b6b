"""The fields that go to the call of a diffusers pipeline: args, files, scheduler and sigmas."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from builders import read_jobs
from one_job import parse_job
from PIL import Image

from gfgen.errors import InputError, JobError, Problem
from gfgen.job.reader import to_mapping
from gfgen.job.shared import parse_overrides
from gfgen.job.spec import JobSpec, default_seed, input_files, spec_hash
from gfgen.models.families.pictures import load_frames, load_video
from gfgen.models.geometry.model import shipped_geometry
from gfgen.runtime.files.metadata import describe, parameters_text


def job(folder: Path | None = None, **fields: Any) -> JobSpec:
    spec, problems = parse_job({"prompt": "a fox", **fields}, folder=folder)
    assert problems == ()
    assert spec is not None
    return spec


def problem(folder: Path | None = None, **fields: Any) -> Problem:
    spec, problems = parse_job({"prompt": "a fox", **fields}, folder=folder)
    assert spec is None
    assert len(problems) == 1, problems
    return problems[0]


def picture(path: Path, *, size: tuple[int, int] = (16, 16)) -> Path:
    Image.linear_gradient("L").resize(size).save(path)
    return path


def video(path: Path) -> Path:
    import imageio_ffmpeg

    source = ("-f", "lavfi", "-i", "testsrc=size=32x16:rate=4:duration=1", "-pix_fmt", "yuv420p")
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *source, str(path)], check=True)
    return path


class TestIdentity:
    def test_a_job_without_these_fields_has_the_id_and_hash_of_before(self) -> None:
        spec = job(steps=4, size="64x64")
        assert spec.id == "a-fox-fbdccb4605"
        assert spec_hash(spec) == "c393c21194db16870131afc62ce3e5f90e1a92f0655a9dbcd58e13485d58b6b9"

    def test_each_of_them_makes_another_job(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png")
        plain = job(id="fox")
        others = [
            job(id="fox", args={"strength": 0.5}),
            job(id="fox", args={"strength": 0.6}),
            job(tmp_path, id="fox", files={"mask_image": "a.png"}),
            job(id="fox", scheduler={"shift": 2}),
            job(id="fox", sigmas=[1.0, 0.5]),
        ]
        hashes = {spec_hash(spec) for spec in (plain, *others)}
        assert len(hashes) == 1 + len(others)
        assert {default_seed(spec.id) for spec in others} == {default_seed("fox")}

    def test_whole_floats_count_as_integers_at_any_depth(self) -> None:
        one, other = job(args={"a": [1.0, 2]}), job(args={"a": [1, 2.0]})
        assert (one.id, spec_hash(one)) == (other.id, spec_hash(other))

    def test_the_content_of_a_file_counts_and_not_its_place(self, tmp_path: Path) -> None:
        content = picture(tmp_path / "a.png").read_bytes()
        (tmp_path / "b.png").write_bytes(content)
        one, other = (job(tmp_path, files={"mask_image": name}) for name in ("a.png", "b.png"))
        assert spec_hash(one) == spec_hash(other)
        picture(tmp_path / "a.png", size=(8, 8))
        assert spec_hash(job(tmp_path, files={"mask_image": "a.png"})) != spec_hash(one)

    def test_a_job_can_be_hashed_and_written_as_a_line(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png")
        spec = job(
            tmp_path,
            args={"prompt_2": "an owl", "flag": True, "none": None},
            files={"image": ["a.png", "a.png"]},
            scheduler={"class": "DDIMScheduler"},
            sigmas=[1, 0.5, 0],
        )
        assert isinstance(hash(spec), int)
        assert parse_job(to_mapping(spec)) == (spec, ())


class TestArgs:
    @pytest.mark.parametrize("value", [5, "text", [], {}, [["a", 1]]])
    def test_other_values_are_refused(self, value: Any) -> None:
        assert problem(args=value).accepted.startswith("an object of arguments")

    @pytest.mark.parametrize(
        ("value", "hint"),
        [
            ({"strength": {"a": 1}}, 'strength is {"a": 1}'),
            ({"strength": float("nan")}, "strength is NaN"),
            ({"strength": [[float("inf")]]}, "strength is Infinity"),
            ({"not a name": 1}, "not a name is not a name"),
            ({"text": "\ud800"}, "text contains an unpaired surrogate"),
            ({"text": "x" * 20_000}, "at most 20,000 characters of JSON; this one has 20,012"),
        ],
    )
    def test_a_wrong_argument_is_named(self, value: Any, hint: str) -> None:
        assert problem(args=value).accepted.endswith(f"; {hint}")

    def test_an_argument_that_is_given_twice_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "jobs.jsonl"
        path.write_text('{"prompt": "a fox", "args": {"a": 1, "a": 2}}')
        (found,) = read_jobs(path).problems
        assert found.field == "args"
        assert found.accepted.endswith("a is given more than once")

    def test_the_command_line_gives_json(self) -> None:
        given = parse_overrides([("--set", 'args={"strength": 0.5}'), ("--set", "sigmas=[1, 0.5]")])
        assert given == {"args": {"strength": 0.5}, "sigmas": [1, 0.5]}
        with pytest.raises(InputError, match="an object of arguments"):
            parse_overrides([("--set", "args=strength")])


class TestFiles:
    def test_paths_are_relative_to_the_job_file(self, tmp_path: Path) -> None:
        path = picture(tmp_path / "a.png")
        spec = job(tmp_path, files={"mask_image": "a.png", "image": ["a.png"]})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert spec.files == {"mask_image": str(path), "image": [str(path)]}
        assert spec.files_sha256 == {"mask_image": digest, "image": [digest]}
        assert input_files(spec) == (("mask_image", path), ("image", path))

    def test_a_video_must_have_a_frame_that_decodes(self, tmp_path: Path) -> None:
        path = video(tmp_path / "a.mp4")
        assert job(tmp_path, files={"video": "a.mp4"}).files == {"video": str(path)}
        (tmp_path / "b.mp4").write_bytes(b"no video")
        found = problem(tmp_path, files={"video": "b.mp4"})
        assert (found.field, found.value) == ("files.video", '"b.mp4"')
        assert re.search(r"is not a video that \S*ffmpeg\S* can read; it ends with \d+$", found.accepted)

    @pytest.mark.filterwarnings("ignore::ResourceWarning")  # imageio leaves a pipe to the collector
    def test_a_run_reads_every_video_that_admission_accepts(self, tmp_path: Path) -> None:
        for suffix, load in (("mp4", load_video), ("m4v", load_video), ("gif", load_frames)):
            path = video(tmp_path / f"a.{suffix}")
            job(tmp_path, files={"video": path.name})
            assert len(load(path)) == 4

    def test_a_playlist_is_no_video_because_it_names_other_files(self, tmp_path: Path) -> None:
        video(tmp_path / "own.mp4")
        (tmp_path / "a.mp4").write_text("ffconcat version 1.0\nfile own.mp4\n")
        assert "not a video" in problem(tmp_path, files={"video": "a.mp4"}).accepted

    def test_every_missing_file_is_a_problem_of_its_argument(self, tmp_path: Path) -> None:
        _, problems = parse_job(
            {"prompt": "a fox", "files": {"a": ["x.png", "y.png"], "b": "z.png"}}, folder=tmp_path
        )
        assert [found.field for found in problems] == ["files.a", "files.a", "files.b"]
        assert problems[0].accepted == f"{tmp_path / 'x.png'} does not exist"

    def test_a_url_is_refused(self) -> None:
        assert "this is a URL" in problem(files={"image": "https://example.org/a.png"}).accepted

    def test_an_image_is_given_once(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png")
        found = problem(tmp_path, image="a.png", files={"image": "a.png"})
        assert found.accepted == "image gives it, too; give only one of them"

    @pytest.mark.parametrize("value", [[], 5, [5], [["a.png"]], "", None, "a\nb.png"])
    def test_other_values_are_refused(self, value: Any) -> None:
        assert problem(files={"image": value}).field == "files"


class TestSigmas:
    def test_they_set_the_number_of_steps(self) -> None:
        spec = job(sigmas=[1, 0.75, 0.5])
        assert (spec.sigmas, spec.steps) == ([1.0, 0.75, 0.5], 3)

    def test_other_steps_are_refused(self) -> None:
        assert (
            problem(sigmas=[1, 0.5], steps=4).accepted == "differs from the 2 numbers of sigmas; leave it out"
        )

    @pytest.mark.parametrize("value", [[], [0.5, 1], [1, 1], [-1], ["1"], [True], 1, [2000], [float("nan")]])
    def test_other_values_are_refused(self, value: Any) -> None:
        assert problem(sigmas=value).field == "sigmas"


class TestReuse:
    def test_never_is_as_if_it_was_not_given(self) -> None:
        plain = job(id="fox")
        assert [job(id="fox", reuse=value) for value in ("never", 0, None)] == [plain] * 3
        assert len({spec_hash(each) for each in (plain, job(id="fox", reuse=0.4))}) == 2

    def test_shares_and_if_late_are_kept(self) -> None:
        assert [job(reuse=value).reuse for value in (0.4, "if-late")] == [0.4, "if-late"]

    @pytest.mark.parametrize("value", [0.81, -0.1, "0.4", "always", True, [0.4]])
    def test_other_values_are_refused(self, value: Any) -> None:
        found = problem(reuse=value)
        assert found.field == "reuse"
        assert found.accepted.startswith('"never", "if-late", or the share of the steps to reuse')


class TestModelsWithFieldsOfTheirOwn:
    @pytest.mark.parametrize("name", ["wan2.2-ti2v-5b", "qwen-image"])
    def test_files_are_refused(self, name: str, tmp_path: Path) -> None:
        picture(tmp_path / "a.png")
        spec = job(
            tmp_path,
            args={"max_sequence_length": 64},
            files={"mask_image": "a.png"},
            scheduler={"class": "euler", "shift": 1},
            sigmas=[1, 0.5],
        )
        with pytest.raises(JobError) as refused:
            shipped_geometry(name).resolve(spec)
        assert [found.field for found in refused.value.problems] == ["files"]

    def test_the_name_of_a_scheduler_is_its_class(self) -> None:
        assert job(scheduler=" DPM++ 2M ").scheduler == {"class": "DPM++ 2M"}
        assert problem(scheduler="").field == problem(scheduler=3).field == "scheduler"


def test_the_metadata_of_a_file_names_inputs_without_their_folders(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    spec = job(tmp_path, args={"prompt_2": "x" * 5000}, files={"image": ["a.png"], "mask_image": "a.png"})
    found = describe(spec)
    assert found["files"] == {"image": ["a.png"], "mask_image": "a.png"}
    assert found["args"] == spec.args
    assert r'files: "{\"image\": [\"a.png\"], \"mask_image\": \"a.png\"}"' in parameters_text(found)


class TestLora:
    def test_files_that_are_no_loras_are_problems(self, tmp_path: Path) -> None:
        for name, header in (("number", b"123456"), ("list", b"[1, 2]"), ("deep", b"[" * 100_000)):
            (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)
        (tmp_path / "loop").symlink_to("loop")
        os.mkfifo(tmp_path / "pipe")
        for name in ("number", "list", "deep", "loop", "pipe", "~no-such-user/a", "x" * 300):
            assert problem(tmp_path, lora=name).field == "lora"

    def test_patches_are_equal_wherever_their_files_are(self) -> None:
        def patched(path: str, **entry: Any) -> JobSpec:
            used = {"sha256": "b", "scale": 0.8, **entry}
            return JobSpec(id="a", prompt="a fox", lora=[used], lora_files=[path])

        here, there = (patched(path).patches for path in ("/a/style.safetensors", "/b/style.safetensors"))
        assert (here, str(here)) == (there, str(there))
        assert [patch.path for patch in here + there] == ["/a/style.safetensors", "/b/style.safetensors"]
        others = ({"scale": 1.0}, {"target": "transformer_2"}, {"partial": True})
        assert len({str(here), *(str(patched("/a", **entry).patches) for entry in others)}) == 4
        assert patched("/a").without_patches() == JobSpec(id="a", prompt="a fox")
