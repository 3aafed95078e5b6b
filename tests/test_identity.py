"""Ids, seeds, file names and the hash that decides whether a finished job is finished."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from one_job import parse_job
from PIL import Image

from gfgen.errors import JobError
from gfgen.job.reader import read_job_stream
from gfgen.job.spec import (
    JobSpec,
    canonical_spec,
    default_id,
    default_output,
    default_seed,
    output_name,
    spec_hash,
    with_defaults,
)

FULL = JobSpec(id="fox", prompt="a fox", width=64, height=64, steps=4, seed=1, guidance_scale=5.0)


def ids(*lines: str) -> list[str]:
    stream = io.BytesIO("\n".join(lines).encode())
    return [spec.id for spec in read_job_stream(stream, source="test", folder=Path()).specs]


class TestHash:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("prompt", "an owl"),
            ("negative_prompt", ""),
            ("model", "tiny-wan"),
            ("width", 128),
            ("height", 128),
            ("frames", 5),
            ("fps", 8),
            ("steps", 5),
            ("guidance_scale", 5.5),
            ("guidance_scale_2", 3.0),
            ("boundary_ratio", 0.9),
            ("flow_shift", 3.0),
            ("true_cfg_scale", 4.0),
            ("seed", 2),
            ("output", "x.png"),
            ("image_sha256", "00"),
        ],
    )
    def test_what_changes_the_file_changes_the_hash(self, name: str, value: Any) -> None:
        base = replace(FULL, image="/a.png", image_sha256="ff") if name == "image_sha256" else FULL
        assert spec_hash(replace(base, **{name: value})) != spec_hash(base)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("id", "other"),
            ("deadline_s", 5.0),
            ("deadline_at", 5.0),
            ("arrival_s", 5.0),
            ("timeout_s", 5.0),
            ("priority", 5),
            ("tag", "S"),
            ("line", 5),
        ],
    )
    def test_what_only_says_when_and_for_whom_does_not(self, name: str, value: Any) -> None:
        assert spec_hash(replace(FULL, **{name: value})) == spec_hash(FULL)

    def test_another_id_is_another_seed_and_so_another_hash(self) -> None:
        unseeded = replace(FULL, seed=None)
        assert spec_hash(replace(unseeded, id="other")) != spec_hash(unseeded)

    def test_the_default_seed_may_be_filled_in_or_not(self) -> None:
        unseeded = replace(FULL, seed=None, model="m")
        assert spec_hash(with_defaults(unseeded, model="x")) == spec_hash(unseeded)

    def test_random_weights_make_another_job(self) -> None:
        assert spec_hash(FULL, has_random_weights=True) != spec_hash(FULL)

    def test_whole_floats_and_integers_are_equal(self) -> None:
        assert spec_hash(replace(FULL, guidance_scale=5)) == spec_hash(FULL)

    def test_the_place_of_an_image_does_not_count(self) -> None:
        one, other = (replace(FULL, image=path, image_sha256="ff") for path in ("/a.png", "/b.png"))
        assert spec_hash(one) == spec_hash(other)

    def test_an_edited_image_makes_another_job(self, tmp_path: Path) -> None:
        hashes = set()
        for shade in ("black", "white"):
            Image.new("RGB", (8, 8), shade).save(tmp_path / "a.png")
            spec, _ = parse_job({"prompt": "a", "image": "a.png"}, folder=tmp_path)
            assert spec is not None
            hashes.add(spec_hash(spec))
        assert len(hashes) == 2

    def test_the_canonical_text_is_frozen(self) -> None:
        # A change here makes every finished job of every user run again.
        assert canonical_spec(FULL) == (
            '{"guidance_scale":5,"height":64,"prompt":"a fox","seed":1,"steps":4,"width":64}'
        )


class TestDefaultId:
    def test_it_is_a_slug_and_a_hash(self) -> None:
        assert ids('{"prompt": "A red Fox, in the snow!"}')[0].startswith("a-red-fox-in-the-snow-")

    def test_accents_are_dropped_from_the_slug(self) -> None:
        assert ids('{"prompt": "caf\\u00e9 cr\\u00e8me"}')[0].startswith("cafe-creme-")

    def test_a_prompt_without_ascii_letters_is_a_job(self) -> None:
        assert ids('{"prompt": "\\u96ea\\u306e\\u72d0"}')[0].startswith("job-")

    def test_a_long_prompt_is_cut_between_words(self) -> None:
        assert ids('{"prompt": "' + "seven7 " * 20 + '"}')[0].startswith(
            "seven7-seven7-seven7-seven7-seven7-"
        )

    def test_a_long_word_is_cut(self) -> None:
        assert len(ids('{"prompt": "' + "x" * 500 + '"}')[0]) == 40 + 1 + 10

    def test_equal_lines_are_numbered(self) -> None:
        first, second, third = ids(*['{"prompt": "a fox"}'] * 3)
        assert (second, third) == (f"{first}-2", f"{first}-3")

    def test_a_deadline_does_not_change_it(self) -> None:
        first, second = ids('{"prompt": "a fox"}', '{"prompt": "a fox", "deadline": 9}')
        assert second == f"{first}-2"

    def test_spelling_one_thing_in_two_ways_does_not_change_it(self) -> None:
        first, second = ids(
            '{"prompt": "a", "size": "64x32", "steps": 4.0}',
            '{"prompt": "a", "height": 32, "width": 64, "steps": 4}',
        )
        assert second == f"{first}-2"

    def test_it_ignores_the_id_that_the_job_has(self) -> None:
        unseeded = replace(FULL, seed=None)
        assert default_id(asdict(unseeded)) == default_id(asdict(replace(unseeded, id="other")))

    def test_it_is_frozen(self) -> None:
        # A change here renames every output of every job without an id.
        assert ids('{"prompt": "a fox"}') == ["a-fox-a36c30abde"]


class TestSeedAndNames:
    def test_the_default_seed_is_frozen(self) -> None:
        assert default_seed("fox") == 2003612454

    def test_the_default_seed_has_32_bits(self) -> None:
        assert all(0 <= default_seed(f"job-{number}") < 2**32 for number in range(100))

    def test_a_seed_and_a_model_that_are_given_stay(self) -> None:
        spec = replace(FULL, seed=0, model="mine")
        assert with_defaults(spec, model="yours") == spec

    @pytest.mark.parametrize(("kind", "name"), [("image", "fox.png"), ("video", "fox.mp4")])
    def test_the_default_file_is_the_id_and_the_kind(self, kind: str, name: str) -> None:
        assert default_output(FULL, kind) == name

    def test_a_name_that_is_given_is_used(self) -> None:
        assert output_name(replace(FULL, output="a.PNG"), "image") == "a.PNG"

    def test_a_name_of_the_other_kind_is_refused(self) -> None:
        with pytest.raises(JobError, match=r"output = a\.jpg: a name that ends in \.mp4"):
            output_name(replace(FULL, output="a.jpg"), "video")
