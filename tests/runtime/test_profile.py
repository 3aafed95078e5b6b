import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_job

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.runtime.predict import profile_store
from gfgen.runtime.predict.profile_file import Profile, ProfileRow, check_profile, load_profile


def profile(*, model="fake", stages=tuple(Stage), num_ranks=2):
    rows = tuple(ProfileRow(model, "small", stage, (1, 1, 1), 0.1, flops=1e9) for stage in stages)
    return Profile("2 cores", "2026-11-20", "a test", num_ranks=num_ranks, rows=rows)


def test_a_profile_comes_back_from_its_file(tmp_path):
    written = profile()
    (tmp_path / "p.json").write_text(written.as_json())
    assert load_profile(tmp_path / "p.json") == written


def spoilt(change):
    content = json.loads(profile().as_json())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "not JSON"),
        ("[]", "not a profile"),
        ("[" * 100_000, "not JSON"),
        ("{}", "its format is not 1"),
        (spoilt(lambda c: c.pop("device")), "missing 1 required positional argument: 'device'"),
        (spoilt(lambda c: c.update(device=7)), "device = 7 is no text"),
        (spoilt(lambda c: c.update(versions=[1])), "versions = "),
        (spoilt(lambda c: c.update(num_ranks=2.5)), "num_ranks = 2.5 is no whole number"),
        (spoilt(lambda c: c.update(num_ranks=1000)), "num_ranks = 1000 is above 8"),
        (spoilt(lambda c: c.update(move_s=None)), "move_s = None is no number"),
        (spoilt(lambda c: c.update(rows={"a": 1})), "it has no rows"),
        (spoilt(lambda c: c["rows"].append(5)), "int in place of an object"),
        (spoilt(lambda c: c["rows"][0].update(model=["a"])), r"row 1: model = \['a'\] is no text"),
        (spoilt(lambda c: c["rows"][0].update(seconds=None)), "row 1: seconds = None is no number"),
        (spoilt(lambda c: c["rows"][0].update(seconds=1e300)), "row 1: seconds = .* is above"),
        (spoilt(lambda c: c.update(format=9)), "its format is not 1"),
        (spoilt(lambda c: c.update(rows=[])), "it has no rows"),
        (spoilt(lambda c: c.update(speed=1)), "unexpected keyword argument 'speed'"),
        (spoilt(lambda c: c.update(num_ranks=0)), "num_ranks = 0 is below 1"),
        (spoilt(lambda c: c.update(move_bytes_per_s=0)), "move_bytes_per_s = 0 is below 1"),
        (spoilt(lambda c: c["rows"][1].update(second=1)), "row 2: .* unexpected keyword argument 'second'"),
        (spoilt(lambda c: c["rows"][2].update(stage="dream")), "row 3: 'dream' is not a valid Stage"),
        (spoilt(lambda c: c["rows"][0].update(seconds="1 s")), "row 1: seconds = '1 s' is no number"),
        (spoilt(lambda c: c["rows"][0].update(seconds=-1)), "row 1: seconds = -1 is below 0"),
        (spoilt(lambda c: c["rows"][0].update(seconds=float("nan"))), "row 1: seconds = nan is no number"),
        (
            spoilt(lambda c: c["rows"][0].update(degrees=[1, 2])),
            r"row 1: degrees \[1, 2\]: three or four",
        ),
        (spoilt(lambda c: c["rows"][0].update(degrees=[1, 0, 1])), r"degrees \[1, 0, 1\]: three or four"),
        (spoilt(lambda c: c["rows"][0].update(degrees=[1, 1.5, 1])), r"degrees \[1, 1.5, 1\]: three or four"),
        (spoilt(lambda c: c.update(read_bytes_per_s=0)), "read_bytes_per_s = 0 is below 1"),
        (spoilt(lambda c: c["rows"][0].pop("seconds")), "row 1: .*seconds"),
    ],
)
def test_a_file_that_is_no_profile_is_named_with_what_is_wrong(tmp_path, content, what):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(InputError, match=what) as caught:
        load_profile(tmp_path / "p.json")
    assert str(caught.value).startswith(f"--profile {tmp_path / 'p.json'}: ")
    assert "\n" not in str(caught.value)


def test_a_profile_with_times_under_load_is_of_ranks_that_share_cores():
    alone = profile()
    assert not alone.shares_cores
    loaded = replace(alone.rows[0], loaded_s=0.2)
    assert (loaded.num_samples, replace(alone, rows=(loaded,)).shares_cores) == (1, True)
    slowest = replace(alone, read_bytes_per_s=1.0)
    assert profile_store.profile_of(json.loads(slowest.as_json())) == slowest


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        load_profile(tmp_path / "p.json")


JOBS = [make_job("a"), make_job("b", shape="other")]


def test_other_shapes_and_degrees_of_a_profiled_model_are_no_mistake():
    check_profile(profile(), JOBS, num_ranks=2)


@pytest.mark.parametrize(
    ("given", "num_ranks", "what"),
    [
        (profile(model="wan"), 2, "has no fake, which 2 of 2 jobs use; it has wan: measure with 'gfgen"),
        (
            profile(stages=(Stage.ENCODE, Stage.DECODE)),
            2,
            "no row of fake for denoise in any layout",
        ),
        (profile(), 4, "--ranks 4: the profile of '2 cores' knows 1 to 2 ranks; use at most 2, or measure"),
    ],
)
def test_a_profile_that_cannot_tell_is_refused_with_what_to_do(given, num_ranks, what):
    with pytest.raises(InputError, match=what):
        check_profile(given, JOBS, num_ranks=num_ranks)


def test_a_gpu_without_a_profile_has_that_of_another_scaled_by_what_both_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a first run would predict days, take all jobs as late and share every step."""
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    (shipped,) = profile_store.shipped_profiles()

    def seconds_on(device: str) -> float:
        found = profile_store.find_profile(device)
        assert found is not None
        return found[1].rows[0].seconds / shipped.rows[0].seconds

    assert seconds_on("NVIDIA H200") == 1
    assert seconds_on("NVIDIA H100 80GB HBM3") == 1
    assert seconds_on("NVIDIA A100-SXM4-80GB") == pytest.approx(989 / 312)
    assert seconds_on("NVIDIA L4") == pytest.approx(989 / 121)
    assert seconds_on("NVIDIA of tomorrow") == pytest.approx(989 / 80)
    assert profile_store.find_profile("another accelerator") is None
