"""Files of finished jobs: metadata, sizes, and what is left behind when something fails."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from movies import decoded, ffmpeg_says
from PIL import Image

from gfgen.errors import OutputError
from gfgen.job.reader import read_job_stream
from gfgen.job.spec import VIDEO_SUFFIXES, JobSpec, lack_of
from gfgen.runtime.core.admission import AdmittedJob, admit
from gfgen.runtime.files.lock import hold_folder
from gfgen.runtime.files.metadata import describe, from_ffmetadata, to_ffmetadata
from gfgen.runtime.files.outputs import (
    Frames,
    Sound,
    _encode_command,
    encoder_threads,
    read_metadata,
    write_output,
)
from gfgen.runtime.ipc import content
from gfgen.runtime.ipc.content import Content, content_of, remove_leftovers, temporary_name
from gfgen.session.admission import find_weightless
from gfgen.system.linefile import LineFile

SPEC = JobSpec(
    id="fox-1",
    prompt="a fox; eyes = amber #1 \\ back\nin snow \u96ea",
    negative_prompt="blur",
    model="wan2.2-ti2v-5b",
    width=48,
    height=32,
    frames=5,
    fps=16,
    steps=8,
    guidance_scale=5.0,
    seed=42,
)
METADATA = describe(SPEC)


def gradient(num_frames: int = 5, height: int = 32, width: int = 48) -> Frames:
    rows, columns = np.mgrid[0:height, 0:width]
    frames = [np.stack([columns * 4, rows * 6, (columns + 5 * idx) % 200], -1) for idx in range(num_frames)]
    return np.stack(frames).astype(np.uint8)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "name",
    ["out.png", "out.jpg", "out.webp", "out.mp4", "out.webm", "out.mov", "with: colon.mp4", "-dash.png"],
)
def test_metadata_comes_back_from_the_file(tmp_path: Path, name: str) -> None:
    frames = gradient(5 if name.endswith(VIDEO_SUFFIXES) else 1)
    written = write_output(frames, tmp_path / name, fps=16, metadata=METADATA)
    assert read_metadata(tmp_path / name) == METADATA
    content = (tmp_path / name).read_bytes()
    assert written == Content(len(content), hashlib.sha256(content).hexdigest())
    assert names_in(tmp_path) == [name]


def test_png_holds_the_exact_frame_and_a_readable_parameters_chunk(tmp_path: Path) -> None:
    write_output(gradient(1), tmp_path / "a.png", fps=None, metadata=METADATA)
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.asarray(image), gradient(1)[0])
        assert image.info["parameters"].splitlines()[-1].startswith("Steps: 8, CFG scale: 5.0, Seed: 42, ")
        assert "Negative prompt: blur" in image.info["parameters"]


@pytest.mark.parametrize(("height", "width"), [(32, 48), (41, 63), (40, 63), (41, 62)])
def test_odd_sizes_are_padded_by_the_edge_and_never_rescaled(tmp_path: Path, height: int, width: int) -> None:
    frames = gradient(height=height, width=width)
    write_output(frames, tmp_path / "a.mp4", fps=16, metadata={})
    even = {"height": height + height % 2, "width": width + width % 2}
    seen = decoded(tmp_path / "a.mp4", **even).astype(int)
    assert len(seen) == 5
    # Lossy, with half the colour resolution; a rescaled gradient would be off by far more.
    assert np.abs(seen[:, :height, :width] - frames).mean() < 4


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.mov"])
def test_video_keeps_its_colours(tmp_path: Path, name: str) -> None:
    red = np.full((3, 32, 32, 3), (200, 30, 60), np.uint8)
    write_output(red, tmp_path / name, fps=8, metadata={})
    assert np.abs(decoded(tmp_path / name, height=32, width=32).astype(int) - red).max() <= 3


@pytest.mark.parametrize(
    ("name", "metadata"), [("a.mp4", {}), ("a.webm", {}), ("a.webm", {"format": "av1"}), ("a.mov", {})]
)
def test_equal_frames_make_equal_videos(tmp_path: Path, name: str, metadata: dict[str, str]) -> None:
    """With sound, and on all threads of the encoder, which are more for wide frames."""
    if lack_of(metadata.get("format", name[2:])) is not None:
        pytest.skip(lack_of(metadata.get("format", name[2:])) or "")
    frames = np.random.default_rng(0).integers(0, 60, (4, 48, 640, 3)).astype(np.uint8)
    wave = np.sin(np.arange(16_000, dtype=np.float32) / 20).reshape(2, -1)
    made = [
        write_output(
            frames, tmp_path / folder / name, fps=8, metadata=metadata, sound=Sound(wave, rate=16_000)
        )
        for folder in ("first", "second")
    ]
    assert made[0] == made[1]
    assert "Audio:" in ffmpeg_says(tmp_path / "first" / name)
    assert len(decoded(tmp_path / "first" / name, height=48, width=640)) == 4


def test_video_can_start_before_it_is_loaded(tmp_path: Path) -> None:
    write_output(gradient(), tmp_path / "a.mp4", fps=8, metadata={})
    content = (tmp_path / "a.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


def test_thousand_frames_are_streamed(tmp_path: Path) -> None:
    one = np.zeros((1, 16, 16, 3), np.uint8)
    write_output(np.broadcast_to(one, (1000, 16, 16, 3)), tmp_path / "a.mp4", fps=24, metadata={})
    assert len(decoded(tmp_path / "a.mp4", height=16, width=16)) == 1000


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
def test_full_disk_says_how_much_is_needed_and_leaves_the_old_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"old")

    def full(path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(content, "_sync", full)
    with pytest.raises(OutputError, match=r"No space left.*MB are needed, .* [GM]B are free; make room"):
        write_output(gradient(1), tmp_path / name, fps=8, metadata={})
    assert names_in(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"old"


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
def test_file_that_hits_a_size_limit_is_removed(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (1, 256, 256, 3), dtype=np.uint8)
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old_limits[1]))
    try:
        with pytest.raises(OutputError, match=r"File too large; .*; raise ulimit -f"):
            write_output(noise, tmp_path / name, fps=8, metadata={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_a_folder_that_cannot_be_synced_does_not_fail_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """CIFS, 9p, FUSE; a disk that fails is another thing."""
    fsync = os.fsync

    def refuse_folders(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    fails = pytest.raises(OutputError) if number == errno.EIO else nullcontext()
    with fails:
        write_output(gradient(1), tmp_path / "fox.png", fps=None, metadata={})
    assert names_in(tmp_path) == ["fox.png"]


def test_files_follow_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_links)
    before = os.umask(0o002)
    try:
        write_output(gradient(1), tmp_path / "fox.png", fps=None, metadata={})
        LineFile(tmp_path / "manifest.jsonl").close()
        with hold_folder(tmp_path):
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(["fox.png", "manifest.jsonl", ".gfgen.lock"], 0o664)


def no_links(*names: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_has_come_during_the_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    write_output(gradient(1), tmp_path / "a.png", fps=None, metadata={})
    (tmp_path / "b.png").write_bytes(b"mine")
    (tmp_path / "c.png").mkdir()
    (tmp_path / "d.png").symlink_to("gone.png")
    for name in ("a.png", "b.png", "c.png", "d.png"):
        with pytest.raises(
            OutputError, match=rf"{name}: another file got this name during the run and was kept"
        ):
            write_output(gradient(1)[:, ::-1], tmp_path / name, fps=None, metadata={})
    assert names_in(tmp_path) == ["a.png", "b.png", "c.png", "d.png"]
    assert (tmp_path / "b.png").read_bytes() == b"mine"
    assert not (tmp_path / "gone.png").exists()
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.asarray(image), gradient(1)[0])


def test_only_the_file_that_was_there_at_admission_is_replaced(tmp_path: Path) -> None:
    old = write_output(gradient(1), tmp_path / "a.png", fps=None, metadata={})
    new = write_output(gradient(1)[:, ::-1], tmp_path / "a.png", fps=None, metadata={}, replaces=old)
    assert content_of(tmp_path / "a.png") == new != old
    with pytest.raises(OutputError, match="was kept"):
        write_output(gradient(1), tmp_path / "a.png", fps=None, metadata={}, replaces=old)
    assert content_of(tmp_path / "a.png") == new
    (tmp_path / "a.png").unlink()
    assert write_output(gradient(1), tmp_path / "a.png", fps=None, metadata={}, replaces=old) == old
    assert names_in(tmp_path) == ["a.png"]


def test_what_an_earlier_try_of_the_same_job_left_is_replaced(tmp_path: Path) -> None:
    path, job = tmp_path / "a.png", {"id": "a", "spec_hash": "1", "job_file": None}
    write_output(gradient(1), path, fps=None, metadata={}, made_for=job)
    again = write_output(gradient(1)[:, ::-1], path, fps=None, metadata={}, made_for=job)
    assert content_of(path) == again
    with pytest.raises(OutputError, match="was kept"):
        write_output(gradient(1), path, fps=None, metadata={}, made_for=job | {"spec_hash": "2"})
    with path.open("ab") as file:
        file.write(b"edited")
    with pytest.raises(OutputError, match="was kept"):
        write_output(gradient(1), path, fps=None, metadata={}, made_for=job)


def test_folder_that_is_a_file_is_one_line_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*outputs/a\.png: .+"):
        write_output(gradient(1), tmp_path / "outputs" / "a.png", fps=None, metadata={})


def test_missing_ffmpeg_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_ffmpeg(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "imageio_ffmpeg":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_ffmpeg)
    with pytest.raises(OutputError, match="pip install imageio-ffmpeg"):
        write_output(gradient(), tmp_path / "a.mp4", fps=8, metadata={})
    assert names_in(tmp_path) == []


def test_an_ffmpeg_that_goes_during_the_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "gone"))
    with pytest.raises(OutputError, match="/gone: this ffmpeg is gone, or cannot be executed"):
        write_output(gradient(), tmp_path / "a.mp4", fps=8, metadata={})


def test_process_that_dies_before_the_rename_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    script = (
        "import os, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from gfgen.runtime.files.outputs import write_output\n"
        "os.link = lambda *names: os._exit(9)\n"
        "write_output(np.zeros((1, 8, 8, 3), np.uint8), Path(sys.argv[1]), fps=None, metadata={})\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.png")], check=False)
    assert died.returncode == 9
    assert not (tmp_path / "a.png").exists()
    assert remove_leftovers(tmp_path) == 1
    assert names_in(tmp_path) == []


def test_only_our_own_unfinished_files_are_removed_and_no_folder_is_entered(tmp_path: Path) -> None:
    ours = [temporary_name(tmp_path / name, pid=17).name for name in ("a.mp4", "b c.PNG", f"{'x' * 80}.webp")]
    others = [
        ".a.tmp-17",
        ".a.tmp-x1.png",
        ".a.tmp-17.txt",
        ".a.tmp-17.png.part",
        "a.tmp-17.png",
        ".rsync.tmp-9",
    ]
    below = temporary_name(tmp_path / "other run" / "a.mp4", pid=18)
    below.parent.mkdir()
    for path in (*(tmp_path / name for name in (*ours, *others)), below):
        path.write_bytes(b"")
    assert remove_leftovers(tmp_path) == len(ours)
    assert names_in(tmp_path) == sorted([*others, "other run"])
    assert below.exists()


def test_temporary_name_stays_in_the_folder_and_keeps_the_suffix() -> None:
    name = temporary_name(Path("out") / ("\u96ea" * 80 + ".mp4"))
    assert name.parent == Path("out")
    assert name.suffix == ".mp4"
    assert name.name.startswith(".")
    assert len(name.name.encode()) < 255


def test_ffmetadata_text_survives_every_special_character() -> None:
    tags = {"title": "a=b;c#d\\e\nf", "comment": "", "description": "\\n == \\"}
    assert from_ffmetadata(to_ffmetadata(tags)) == tags


def test_metadata_without_what_files_cannot_hold(tmp_path: Path) -> None:
    write_output(gradient(1), tmp_path / "a.png", fps=None, metadata={"prompt": "a\0b\ud800c"})
    assert read_metadata(tmp_path / "a.png") == {"prompt": "ab?c"}


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.avif", "a.mp4", "a.webm", "a.mov", "a.gif"])
@pytest.mark.parametrize("prompt", ["x" * 20_000, "\u96ea" * 20_000])
def test_the_longest_prompt_is_whole_in_the_file(tmp_path: Path, name: str, prompt: str) -> None:
    if lack_of(name[2:]) is not None:
        pytest.skip(lack_of(name[2:]) or "")
    metadata = describe(JobSpec(id="a", prompt=prompt))
    write_output(gradient(1), tmp_path / name, fps=8, metadata=metadata)
    assert read_metadata(tmp_path / name) == metadata


def test_a_jpeg_has_no_line_rather_than_a_part_of_one(tmp_path: Path) -> None:
    long = "\u96ea" * 20_000
    write_output(
        gradient(1), tmp_path / "a.jpg", fps=None, metadata={"prompt": long, "negative_prompt": long}
    )
    assert read_metadata(tmp_path / "a.jpg") == {}


def test_metadata_names_the_image_without_its_folder() -> None:
    spec = JobSpec(id="a", prompt="x", image="/home/someone/private/cat.png", image_sha256="ab12")
    assert describe(spec)["image"] == "cat.png"


@pytest.mark.parametrize("name", ["again.png", "again.mp4"])
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("shapes", {"frames": 9, "guidance_scale": 2.5}),
        ("shapes", {"image": "star.png", "tag": "L", "seed": 2**63 - 1}),
        ("wan2.2-ti2v-5b", {"size": "832x480", "frames": 50, "prompt": 'a "fox";\n= #1, \u72d0'}),
        ("wan2.2-t2v-a14b", {"guidance_scale_2": 3}),
        ("qwen-image", {"negative_prompt": " ", "true_cfg_scale": 1.5}),
    ],
)
def test_metadata_of_a_file_is_a_line_of_a_job_file(
    tmp_path: Path, model: str, fields: dict[str, object], name: str
) -> None:
    """It is the job as it ran: the same seed, size and numbers, whatever the defaults become."""
    Image.new("RGB", (16, 16), "gold").save(tmp_path / "star.png")
    job = admitted(json.dumps({"prompt": "a fox", "model": model, "deadline": "5m", **fields}), tmp_path)
    found = describe(job.spec, weights="revision abc123")
    write_output(gradient(1), tmp_path / name, fps=8, metadata=found)
    assert b"Weights: revision abc123" in (tmp_path / name).read_bytes()
    again = admitted(json.dumps(read_metadata(tmp_path / name)), tmp_path)
    assert replace(again.spec, line=None) == replace(job.spec, line=None, deadline_s=None)


def admitted(line: str, folder: Path) -> AdmittedJob:
    parsed = read_job_stream(io.BytesIO(line.encode()), source="a.jsonl", folder=folder)
    (job,), problems = admit(parsed.specs, default_model="shapes", find_model=find_weightless)
    assert (parsed.problems, problems) == ((), ())
    return job


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 2), (2, 2), (16, 4), (32, 8), (128, 8)])
def test_an_encoder_has_a_quarter_of_the_cores_within_bounds(num_cores: int, num_threads: int) -> None:
    assert encoder_threads(num_cores) == num_threads


def parsed_by_a1111(text: str) -> dict[str, str]:
    """What AUTOMATIC1111's web UI finds: pairs in the last line, in which JSON strings are quoted values."""
    *lines, last = text.split("\n")
    prompt, _, negative = "\n".join(lines).partition("\nNegative prompt: ")
    found = {"Prompt": prompt, "Negative prompt": negative}
    while last:
        name, _, last = last.partition(": ")
        end = (last + ",").index(",")
        found[name] = last[:end]
        if last.startswith('"'):
            found[name], end = json.JSONDecoder().raw_decode(last)
        last = last[end:].removeprefix(",").lstrip()
    assert len(found) >= 5, "it takes a line with fewer than three pairs for a part of the prompt"
    return found


def a1111_text(path: Path) -> str:
    """Source: read_info_from_image of its images.py, where piexif reads the comment."""
    with Image.open(path) as image:
        if image.format == "PNG":
            return str(image.info["parameters"])
        raw = image.info["exif"].removeprefix(b"Exif\0\0")
        assert b"\x92\x86\0\7" in raw, "piexif takes a comment of type UNDEFINED alone"
        comment = image.getexif().get_ifd(0x8769)[0x9286]
    assert comment.startswith(b"UNICODE\0")
    return str(comment[8:].decode("utf-16-be"))


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_the_parser_of_a1111_reads_every_value(tmp_path: Path, name: str) -> None:
    spec = replace(
        SPEC,
        prompt="a fox, red: (sitting:1.2)\nin snow \u96ea",
        negative_prompt='blur, "text"',
        tag='cover, "A"',
        model="models/flux, dev: v2",
        args={"strength": 0.5, "prompt_2": 'a, "b"'},
        sigmas=[1.0, 0.5],
        background="#ff8800",
    )
    write_output(gradient(1), tmp_path / name, fps=None, metadata=describe(spec, weights="abc"), place=(2, 4))
    found = parsed_by_a1111(a1111_text(tmp_path / name))
    assert (found["Prompt"], found["Negative prompt"]) == (spec.prompt, spec.negative_prompt)
    assert {key: found[key] for key in ("Steps", "CFG scale", "Seed", "Size", "Model", "Picture", "tag")} == {
        "Steps": "8",
        "CFG scale": "5.0",
        "Seed": "42",
        "Size": "48x32",
        "Model": spec.model,
        "Picture": "2 of 4",
        "tag": spec.tag,
    }
    assert json.loads(found["args"]) == spec.args
    assert json.loads(found["sigmas"]) == spec.sigmas
    assert found["background"] == "#ff8800"
    assert read_metadata(tmp_path / name) == describe(spec)


def test_the_size_is_that_of_the_picture(tmp_path: Path) -> None:
    """Pipelines may make another one than the job asked for."""
    write_output(gradient(1, 40, 64), tmp_path / "a.png", fps=None, metadata=METADATA)
    assert parsed_by_a1111(a1111_text(tmp_path / "a.png"))["Size"] == "64x40"


@pytest.mark.parametrize(
    ("output", "format_"),
    [
        *(("a.jpg", "jpeg"), ("a.JPEG", "jpeg"), ("a.webp", "webp"), ("a.gif", "gif"), ("a.avif", "avif")),
        *(("a.webm", "webm"), ("a.mov", "prores")),
    ],
)
def test_a_line_says_the_format_that_the_name_gave(output: str, format_: str) -> None:
    assert describe(JobSpec(id="a", prompt="x", output=output))["format"] == format_
    assert "format" not in describe(JobSpec(id="a", prompt="x", output="a.png"))


# Alpha ------------------------------------------------------------------------------------------


def with_alpha() -> Frames:
    alpha = np.where(np.arange(48) < 24, 0, 255)[None, None, :, None] * np.ones((1, 32, 48, 1))
    return np.concatenate([gradient(1), alpha], -1).astype(np.uint8)


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.avif"])
def test_pictures_keep_alpha(tmp_path: Path, name: str) -> None:
    if lack_of(name[2:]) is not None:
        pytest.skip(lack_of(name[2:]) or "")
    write_output(with_alpha(), tmp_path / name, fps=None, metadata=METADATA)
    with Image.open(tmp_path / name) as image:
        assert image.mode == "RGBA"
        assert np.array_equal(np.asarray(image)[..., 3], with_alpha()[0, ..., 3])
        if name == "a.png":
            assert np.array_equal(np.asarray(image), with_alpha()[0])


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_a_background_is_under_transparent_pixels(tmp_path: Path, name: str) -> None:
    metadata = METADATA | {"background": "#ff0000", "quality": 100}
    write_output(with_alpha(), tmp_path / name, fps=None, metadata=metadata)
    with Image.open(tmp_path / name) as image:
        assert image.mode == "RGB"
        assert np.abs(np.asarray(image).astype(int)[:, :20] - (255, 0, 0)).max() <= 3
        assert np.abs(np.asarray(image).astype(int)[:, 28:] - gradient(1)[0, :, 28:]).mean() < 3


# Other formats ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_frames", "kind"),
    [("a.avif", 1, "AVIF"), ("a.webp", 5, "WEBP"), ("a.gif", 5, "GIF"), ("a.jpeg", 1, "JPEG")],
)
def test_pictures_and_animations_hold_their_frames_and_metadata(
    tmp_path: Path, name: str, num_frames: int, kind: str
) -> None:
    if lack_of(kind.lower()) is not None:
        pytest.skip(lack_of(kind.lower()) or "")
    frames = gradient(num_frames)
    write_output(frames, tmp_path / name, fps=10, metadata=METADATA)
    assert read_metadata(tmp_path / name) == METADATA
    with Image.open(tmp_path / name) as image:
        assert image.format == kind
        assert getattr(image, "n_frames", 1) == num_frames
        assert image.size == (frames.shape[2], frames.shape[1])
        assert np.abs(np.asarray(image.convert("RGB")).astype(int) - frames[0]).mean() < 12
        assert num_frames == 1 or image.info["duration"] == 100


@pytest.mark.parametrize(
    ("name", "format_", "codec"),
    [
        *(("a.mp4", "mp4", b"avc1"), ("a.mp4", "h265", b"hvc1"), ("a.mp4", "av1", b"av01")),
        *(("a.webm", "webm", b"V_VP9"), ("a.webm", "av1", b"V_AV1"), ("a.mov", "prores", b"apch")),
    ],
)
def test_videos_have_the_codec_that_the_job_asks_for(
    tmp_path: Path, name: str, format_: str, codec: bytes
) -> None:
    if lack_of(format_) is not None:
        pytest.skip(lack_of(format_) or "")
    metadata = METADATA | {"format": format_}
    frames = gradient(5, 64, 64)
    write_output(frames, tmp_path / name, fps=8, metadata=metadata)
    assert codec in (tmp_path / name).read_bytes()
    assert read_metadata(tmp_path / name) == metadata
    seen = decoded(tmp_path / name, height=64, width=64).astype(int)
    assert np.abs(seen - frames).mean() < 6


@pytest.mark.parametrize("name", ["a.jpg", "a.webp", "a.mp4", "a.webm"])
def test_less_quality_makes_smaller_files(tmp_path: Path, name: str) -> None:
    number = 3 if name.endswith(VIDEO_SUFFIXES) else 1
    noise = np.random.default_rng(0).integers(0, 255, (number, 64, 64, 3), np.uint8)
    sizes = [
        write_output(noise, tmp_path / f"{quality}-{name}", fps=8, metadata={"quality": quality}).size_bytes
        for quality in (20, 60, 95)
    ]
    assert sizes == sorted(set(sizes))


def test_a_file_in_a_subfolder_is_written_there(tmp_path: Path) -> None:
    write_output(gradient(1), tmp_path / "S" / "day" / "a.png", fps=None, metadata={})
    assert names_in(tmp_path / "S" / "day") == ["a.png"]


def test_a_video_has_its_size_in_its_description_and_the_samples_of_its_codec(tmp_path: Path) -> None:
    write_output(gradient(2, 32, 48), tmp_path / "a.mp4", fps=8, metadata=METADATA)
    assert b"Size: 48x32" in (tmp_path / "a.mp4").read_bytes()
    for coding, pixels in (("prores_ks", "yuv422p10le"), ("libx264", "yuv420p")):
        command = _encode_command(
            gradient(2), tmp_path / "a.mov", ["-c:v", coding], fps=8, tag_fd=0, sound=[]
        )
        assert any(f"format={pixels}," in part for part in command)
