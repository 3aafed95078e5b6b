"""Inputs of every kind: how they become RGB, which files are read, and what is said of them."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from movies import write_videos
from one_job import parse_job
from PIL import Image, features

from gfgen.job import images
from gfgen.job.images import ImageError, ImageReader, LoraError, LoraFiles, as_rgb, remarks_on
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.admission import admit
from gfgen.session.admission import find_weightless

NOISE = np.random.default_rng(0).integers(0, 256, (8, 12, 4), np.uint8)


def pixels(picture: Image.Image, **options: Any) -> np.ndarray:
    return np.asarray(as_rgb(picture, **options))


def transparent_kinds() -> dict[str, Image.Image]:
    """Pictures of every mode that can be transparent, each with two pixels: red, and a transparent one."""
    rgba = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    rgba.putpixel((1, 0), (0, 200, 0, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 200, 0])
    palette.putpixel((1, 0), 1)
    palette.info["transparency"] = 1
    key = rgba.convert("RGB")
    key.info["transparency"] = (0, 200, 0)
    return {"RGBA": rgba, "P": palette, "RGB": key, "PA": rgba.convert("PA")}


class TestTransparentPixels:
    @pytest.mark.parametrize("mode", ["RGBA", "P", "RGB", "PA"])
    def test_what_lies_under_them_changes_nothing(self, mode: str) -> None:
        picture = transparent_kinds()[mode]
        assert picture.mode == mode
        assert pixels(picture).tolist() == [[[255, 0, 0], [255, 255, 255]]]
        assert pixels(picture, background="#0000ff").tolist() == [[[255, 0, 0], [0, 0, 255]]]
        assert pixels(picture, has_alpha=True)[0, :, 3].tolist() == [255, 0]

    def test_half_transparent_pixels_are_mixed(self) -> None:
        alpha = NOISE[..., 3:] / 255
        expected = NOISE[..., :3] * alpha + 255 * (1 - alpha)
        assert np.abs(pixels(Image.fromarray(NOISE)) - expected).max() <= 1

    def test_opaque_pixels_keep_their_bits(self) -> None:
        opaque = NOISE.copy()
        opaque[..., 3] = 255
        assert np.array_equal(pixels(Image.fromarray(opaque)), opaque[..., :3])
        opaque[0, 0, 3] = 0
        assert np.array_equal(pixels(Image.fromarray(opaque))[1:], opaque[1:, :, :3])


class TestNumbersOfMoreThan8Bits:
    @pytest.mark.parametrize("name", ["a.png", "a.tiff"])
    def test_grey_of_16_bits_is_scaled(self, tmp_path: Path, name: str) -> None:
        grey = NOISE[..., 0]
        Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / name)
        with Image.open(tmp_path / name) as picture:
            assert picture.mode.startswith("I;16")
            assert np.array_equal(pixels(picture), np.stack([grey] * 3, -1))

    @pytest.mark.parametrize(
        ("dtype", "values", "expected"),
        [
            (np.float32, [0, 0.5, 1], [0, 128, 255]),
            (np.float32, [0, 128, 255], [0, 128, 255]),
            (np.float32, [0, 32_768, 65_535], [0, 128, 255]),
            (np.float32, [-1, 0.25, np.nan], [0, 64, 0]),
            (np.float32, [0, 1e6, 2e6], [0, 128, 255]),
            (np.float32, [0, 0, 0], [0, 0, 0]),
            (np.int32, [0, 1, 255], [0, 1, 255]),
            (np.int32, [0, 257, 65_535], [0, 1, 255]),
        ],
    )
    def test_other_numbers_are_scaled_by_the_largest(
        self, dtype: Any, values: list[float], expected: list[int]
    ) -> None:
        picture = Image.fromarray(np.array([values], dtype))
        assert pixels(picture)[0, :, 0].tolist() == expected

    def test_a_range_that_is_taken_is_told(self, tmp_path: Path) -> None:
        Image.fromarray(np.ones((2, 2), np.float32) * 300).save(tmp_path / "depth.tiff")
        (remark,) = remarks_on(str(tmp_path / "depth.tiff"), "", argument="image")
        assert remark.detail == "depth.tiff: 65535 is taken for white"


def movie(path: Path, times: list[int] | int = 100, **options: Any) -> Path:
    frames = [Image.fromarray(np.roll(NOISE[..., :3], idx, 1)) for idx in range(4)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0, **options)
    return path


class TestFormats:
    @pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif", "tiff", "avif"])
    def test_what_gfgen_writes_and_what_others_write_is_read(self, tmp_path: Path, suffix: str) -> None:
        if suffix == "avif" and not features.check("avif"):
            pytest.skip("this Pillow has no AVIF")
        Image.fromarray(NOISE[..., :3]).save(tmp_path / f"a.{suffix}")
        for given in ({"image": f"a.{suffix}"}, {"files": {"mask_image": f"a.{suffix}"}}):
            _, problems = parse_job({"prompt": "a", **given}, folder=tmp_path)
            assert problems == ()

    @pytest.mark.parametrize("suffix", ["gif", "webp"])
    def test_an_animation_is_checked_to_its_last_frame(self, tmp_path: Path, suffix: str) -> None:
        content = movie(tmp_path / f"a.{suffix}").read_bytes()
        (tmp_path / f"a.{suffix}").write_bytes(content[: int(len(content) * 0.8)])
        with pytest.raises(ImageError, match=r"broken|not a picture"):
            ImageReader(tmp_path).check(f"a.{suffix}", may_be_video=True)

    def test_too_many_frames_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(images, "MAX_ANIMATION_PIXELS", 300)
        with pytest.raises(ImageError, match="its frames have 384 pixels, more than 300"):
            ImageReader(tmp_path).check(movie(tmp_path / "a.gif").name)


def remarks(path: Path, argument: str = "video") -> list[str]:
    """Without the rate, which counts beside that of a job."""
    found = remarks_on(str(path), "", argument=argument)
    return [str(each) for each in found if each.kind != images.RATE]


class TestWhatIsSaidOfFiles:
    @pytest.mark.parametrize("suffix", ["gif", "webp"])
    def test_frames_of_uneven_times(self, tmp_path: Path, suffix: str) -> None:
        assert remarks(movie(tmp_path / f"even.{suffix}")) == []
        uneven = movie(tmp_path / f"a.{suffix}", [20, 100, 500, 20])
        assert remarks(uneven) == [f"frames of uneven times count once each: a.{suffix}: 20 to 500 ms"]

    @pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.tiff"])
    def test_a_picture_of_several_frames_where_one_counts(self, tmp_path: Path, name: str) -> None:
        assert remarks(movie(tmp_path / name), "control_image") == [
            f"the first of several frames or pages counts: {name} has 4"
        ]

    @pytest.mark.parametrize(("white", "is_dark"), [(1, True), (100, True), (200, False)])
    def test_a_mask_without_light_pixels(self, tmp_path: Path, white: int, is_dark: bool) -> None:
        Image.fromarray(np.uint8([[0, white]])).save(tmp_path / "a.png")
        expected = ["a mask without light pixels selects nothing: a.png"] if is_dark else []
        assert remarks(tmp_path / "a.png", "mask_image") == expected
        assert remarks(tmp_path / "a.png", "image") == []

    def test_a_transparent_mask_has_one_of_its_own(self, tmp_path: Path) -> None:
        Image.fromarray(NOISE).save(tmp_path / "a.png")
        assert remarks(tmp_path / "a.png", "mask_image") == [f"{images.TRANSPARENT_MASK}: a.png"]

    def test_a_video_whose_rate_changes(self, tmp_path: Path) -> None:
        write_videos(tmp_path)
        assert remarks(tmp_path / "even.mp4") == remarks(tmp_path / "even.mkv") == []
        assert remarks(tmp_path / "phone.mp4") == [
            "frames of uneven times are repeated or left out: phone.mp4: 33 become 58, 30 per second"
        ]
        assert remarks(tmp_path / "alpha.mov") == [
            "transparent pixels of a video show what lies under them: alpha.mov"
        ]

    @pytest.mark.parametrize(
        ("name", "options", "remark"),
        [
            (
                "a.webm",
                "-pix_fmt yuva420p -c:v libvpx-vp9",
                "transparent pixels of a video show what lies under",
            ),
            (
                "a.mov",
                "-pix_fmt yuv422p10le -c:v prores -vf setparams=color_trc=smpte2084",
                "colours of an HDR video become",
            ),
            ("b.mov", "-pix_fmt yuv422p10le -c:v prores -vf setparams=color_trc=bt709", None),
        ],
    )
    def test_a_video_with_what_its_format_line_does_not_say(
        self, tmp_path: Path, name: str, options: str, remark: str | None
    ) -> None:
        import imageio_ffmpeg

        source = ["-v", "error", "-f", "lavfi", "-i", "color=red:size=32x32:rate=8:duration=0.5"]
        command = [imageio_ffmpeg.get_ffmpeg_exe(), *source, *options.split(), str(tmp_path / name)]
        subprocess.run(command, check=True)
        found = remarks(tmp_path / name)
        assert len(found) == (remark is not None)
        assert remark is None or found[0].startswith(remark)

    def test_a_file_that_is_gone_has_none(self, tmp_path: Path) -> None:
        assert remarks(tmp_path / "a.png") == remarks(tmp_path / "a.mp4") == []


def warnings_of(folder: Path, **fields: Any) -> list[str]:
    job = {"prompt": "a star", "model": "shapes", "size": "192x128", **fields}
    spec, problems = parse_job(job, folder=folder)
    assert isinstance(spec, JobSpec)
    (admitted,), refused = admit([spec], default_model="shapes", find_model=find_weightless)
    assert (problems, refused) == ((), ())
    return list(map(str, admitted.info.warnings))


class TestWarningsOfAJob:
    def test_transparent_pixels_unless_the_job_has_a_colour_for_them(self, tmp_path: Path) -> None:
        Image.fromarray(NOISE).save(tmp_path / "cut.png")
        assert warnings_of(tmp_path, image="cut.png") == [f"{images.TRANSPARENT}: cut.png"]
        assert warnings_of(tmp_path, image="cut.png", background="gold") == []

    def test_a_colour_without_transparent_pixels(self, tmp_path: Path) -> None:
        Image.fromarray(NOISE[..., :3]).save(tmp_path / "a.png")
        assert warnings_of(tmp_path, image="a.png") == []
        expected = ["background has no effect: no pixel of a picture is transparent"]
        assert warnings_of(tmp_path, image="a.png", background="gold") == expected
        assert warnings_of(tmp_path, background="gold") == expected

    @pytest.mark.parametrize("value", ["nope", "#12", "#11223344", 5, ["red"], ""])
    def test_other_values_than_colours_are_refused(self, value: Any) -> None:
        _, (problem,) = parse_job({"prompt": "a", "background": value})
        assert problem.field == "background"
        assert problem.accepted.startswith('a colour, such as "white" or "#ff8800"')


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(NOISE[..., :3]).save(tmp_path / "a.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ImageReader(Path("elsewhere")).check("~/a.png")[0] == tmp_path / "a.png"


def test_a_size_does_not_depend_on_odd_metadata(tmp_path: Path) -> None:
    for name, kind, count, value in (("text", 2, 4, b"six\0"), ("turned", 3, 2, b"\6\0\6\0")):
        entry = struct.pack("<HHHI", 1, 274, kind, count) + value
        exif = b"Exif\0\0II*\0\x08\0\0\0" + entry + bytes(4)
        Image.new("RGB", (48, 32)).save(tmp_path / f"{name}.jpg", exif=exif)
    assert images.upright_size(str(tmp_path / "text.jpg"), "") == (48, 32)
    assert images.upright_size(str(tmp_path / "turned.jpg"), "") == (32, 48)


def test_a_lora_is_known_by_its_content_and_may_have_metadata(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    name, numbers = "blocks.0.to_q.lora_A.weight", np.ones((2, 3), np.float32)
    save_file({name: numbers}, tmp_path / "a.safetensors", metadata={"made": "by hand"})
    files = LoraFiles(tmp_path)
    path, digest = files.check("a.safetensors", None)
    assert (path, digest) == (tmp_path / "a.safetensors", hashlib.sha256(path.read_bytes()).hexdigest())
    save_file({name: numbers * np.nan}, tmp_path / "b.safetensors")
    with pytest.raises(LoraError, match="has NaN or infinity"):
        files.check("b.safetensors", None)
    other = {f"diffusion_model.{name}": numbers, name.replace("lora_A", "lora_B"): numbers * 0}
    lokr = {f"a.lokr_{kind}": numbers * (kind != "w2_b") for kind in ("w1", "w2_a", "w2_b")}
    minus = {each: values if values.any() else -values for each, values in other.items()}
    off = {"a.lora_up.weight": numbers, "a.alpha": np.zeros(1, np.float32)}
    lokr_off = {f"a.lokr_{kind}": numbers for kind in ("w1", "w2_a", "w2_b")} | {
        "a.alpha": -np.zeros(1, "f4")
    }
    whole = off | {"a.alpha": np.zeros((), np.int64)}
    for number, tensors in enumerate((other, minus, lokr, off, whole, lokr_off)):
        save_file(tensors, tmp_path / f"d{number}.safetensors")
        with pytest.raises(LoraError, match="has no effect, because its second factors or alphas are all 0"):
            files.check(f"d{number}.safetensors", None)
    save_file(other | {"b.lora_B.weight": numbers}, tmp_path / "e.safetensors")
    files.check("e.safetensors", None)  # 0 in some layers only
    for number, more in enumerate(({"b.lora_up.weight": numbers}, {"a.alpha": np.ones(1, np.float32)})):
        save_file(off | more, tmp_path / f"f{number}.safetensors")
        files.check(f"f{number}.safetensors", None)
    with pytest.raises(LoraError, match=r"c\.safetensors"):
        files.check("c.safetensors", None)
