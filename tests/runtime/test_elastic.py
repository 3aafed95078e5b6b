"""Jobs whose layout changes at every step, on real workers."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from movies import decoded
from PIL import Image
from test_workers import PICTURE, VIDEO, pixels, run

from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.core.events import TaskFailed
from gfgen.snapshot import Decision

WANDER = [(0,), (2, 3), (1, 3, 0, 2), (2, 0, 1), (3,), (1, 0)]
"""Degrees 1, 2, 4, 3 and back, on other ranks each time."""


FAMILIES = {
    "wan": {"model": "tiny-wan"},
    "wan image to video": {"model": "tiny-wan", "image": True},
    "shapes": {"model": "shapes"},
    "shapes image to video": {"model": "shapes", "image": True},
    "wan moe": {"model": "tiny-wan-moe"},
    "wan moe image to video": {"model": "tiny-wan-moe-i2v", "image": True},
    "qwen-image": {"model": "tiny-qwen-image", "frames": None, "negative_prompt": "blurry"},
}


def following(*layouts):
    """A policy that gives the n-th step of every job the n-th of these layouts, or sets of ranks."""

    def decide(snapshot):
        free = set(snapshot.free_ranks)
        decisions = []
        for job in snapshot.open.values():
            step = job.next_task.step or 0
            layout = layouts[step % len(layouts)]
            if job.max_degree == 1:
                layout = Layout.single(layout.ranks[0] if isinstance(layout, Layout) else layout[0])
            elif not isinstance(layout, Layout):
                # As usual, and not as is quickest here: which that is may change from run to run.
                layout = replace(job, arrangement=None).layout(layout)
            if free.issuperset(layout.ranks):
                free -= set(layout.ranks)
                decisions.append(Decision(job.next_task, layout))
        return decisions

    return NamedPolicy("following", decide)


def assert_nothing_failed(recorder):
    assert [e for e in recorder.events if isinstance(e, TaskFailed)] == []
    assert {o.status for o in recorder.outcomes} == {"done"}


@pytest.mark.parametrize("fields", [PICTURE, PICTURE | {"negative_prompt": "blurry"}], ids=["plain", "cfg"])
@pytest.mark.parametrize("lookahead_s", [0.0, 1.0])
def test_a_picture_survives_any_change_of_layout(pool, tmp_path, fields, lookahead_s):
    spec = JobSpec(id="picture", prompt="a red fox", **fields | {"steps": 6})
    assert_nothing_failed(run(pool, tmp_path / "one", spec, policy="fcfs"))
    recorder = run(pool, tmp_path / "many", spec, policy=following(*WANDER), lookahead_s=lookahead_s)
    assert_nothing_failed(recorder)
    assert [len(ranks) for ranks in recorder.ranks_of("picture")[2:-1]] == [1, 2, 4, 3, 1, 2]
    one, many = (pixels(tmp_path / folder / "picture.png").astype(int) for folder in ("one", "many"))
    assert np.abs(one - many).max() <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_migration_in_mid_trajectory_keeps_the_latents(pool, tmp_path, family):
    image = tmp_path / "boat.png"
    Image.new("RGB", (64, 64), "teal").save(image)
    fields = dict(FAMILIES[family], image=str(image)) if FAMILIES[family].get("image") else FAMILIES[family]
    spec = JobSpec(id="job", prompt="a boat", **VIDEO | fields | {"steps": 7})
    shifted = [tuple((rank + 1) % 4 for rank in ranks) for ranks in WANDER]
    results = {}
    for name, layouts in {"one": [(0,)], "wander": WANDER, "shifted": shifted}.items():
        recorder = run(pool, tmp_path / name, spec, policy=following(*layouts))
        assert_nothing_failed(recorder)
        results[name] = recorder.latents["job"]
    for field, alone in results["one"].items():
        distance = (results["wander"][field] - alone).abs().max() / alone.abs().max()
        assert distance <= 1e-5, field
        assert torch.equal(results["wander"][field], results["shifted"][field])


RINGS = [
    Layout((3,)),
    Layout((2, 0), ring=2),
    Layout((1, 3, 0, 2), ulysses=2, ring=2),
    Layout((2, 0, 1), ring=3),
    Layout((0, 1), ulysses=2),
    Layout((3, 1, 2, 0), ring=4),
]


@pytest.mark.parametrize("family", ["wan", "qwen-image"])
def test_heads_and_keys_may_be_shared_by_turns(pool, tmp_path, family):
    spec = JobSpec(id="job", prompt="a boat", **VIDEO | FAMILIES[family] | {"steps": 7})
    shifted = [replace(layout, ranks=tuple((rank + 1) % 4 for rank in layout.ranks)) for layout in RINGS]
    results = {}
    for name, layouts in {"one": [(0,)], "rings": RINGS, "shifted": shifted}.items():
        recorder = run(pool, tmp_path / name, spec, policy=following(*layouts))
        assert_nothing_failed(recorder)
        results[name] = recorder.latents["job"]
    for field, alone in results["one"].items():
        distance = (results["rings"][field] - alone).abs().max() / alone.abs().max()
        assert distance <= 1e-5, field
        assert torch.equal(results["rings"][field], results["shifted"][field])


def test_equal_layout_shapes_on_other_ranks_give_the_same_file(pool, tmp_path):
    spec = JobSpec(id="video", prompt="a lighthouse", **VIDEO)
    layouts = {"low": [(0, 1), (0, 1, 2)], "high": [(3, 2), (1, 3, 0)]}
    for name, ranks in layouts.items():
        assert_nothing_failed(run(pool, tmp_path / name, spec, policy=following(*ranks)))
    low, high = ((tmp_path / name / "video.mp4").read_bytes() for name in layouts)
    assert low == high


@pytest.mark.parametrize(
    "fields", [PICTURE, VIDEO | {"height": 96, "quality": 100}], ids=["picture", "video"]
)
def test_a_decode_shared_in_bands_of_rows_makes_the_same_frames(pool, tmp_path, fields):
    spec = JobSpec(id="job", prompt="a lighthouse", **fields)
    files = {}
    for name, ranks in {"alone": (1,), "shared": (3, 0, 2), "elsewhere": (2, 1, 3)}.items():

        def decide(snapshot, ranks=ranks):
            for job in snapshot.open.values():
                wanted = ranks if job.next_task.stage is Stage.DECODE else (1,)
                if set(wanted) <= set(snapshot.free_ranks):
                    yield Decision(job.next_task, job.layout(wanted))

        recorder = run(pool, tmp_path / name, spec, policy=NamedPolicy("decoding", decide))
        assert_nothing_failed(recorder)
        assert recorder.ranks_of("job")[-1] == ranks
        (files[name],) = (tmp_path / name).glob("job.*")
    assert files["shared"].read_bytes() == files["elsewhere"].read_bytes()
    is_picture = fields is PICTURE
    shown = [pixels(path) if is_picture else decoded(path, height=96, width=64) for path in files.values()]
    # Even at this quality, compression turns a difference of one level into up to six in a few pixels.
    assert np.abs(shown[0].astype(int) - shown[1]).max() <= (1 if is_picture else 8)


def test_many_jobs_share_the_ranks_in_changing_groups(pool, tmp_path):
    specs = [
        JobSpec(id=f"job-{i}", prompt=f"a fox, {i}", **(PICTURE if i % 2 else VIDEO) | {"seed": i})
        for i in range(6)
    ]

    def mixed(snapshot):
        """Wide and narrow layouts by turns, from whatever is free."""
        free = list(snapshot.free_ranks)
        decisions = []
        for job in snapshot.open.values():
            degree = 1 + (job.next_task.index + int(job.job_id[-1])) % 3
            if len(free) >= degree:
                layout = job.layout(free[:degree])
                free = [rank for rank in free if rank not in layout.ranks]
                decisions.append(Decision(job.next_task, layout))
        return decisions

    assert_nothing_failed(run(pool, tmp_path / "mixed", *specs, policy=NamedPolicy("mixed", mixed)))
    assert_nothing_failed(run(pool, tmp_path / "single", *specs, policy="fcfs"))
    for spec in specs[1::2]:
        one, other = (pixels(tmp_path / folder / f"{spec.id}.png") for folder in ("mixed", "single"))
        assert np.abs(one.astype(int) - other).max() <= 1


@pytest.mark.parametrize("policy", ["legacy", "srtf,degree=2", "fcfs,degree=2", "edf,rescue=false"])
def test_built_in_policies_run_on_groups(pool, tmp_path, policy):
    specs = [JobSpec(id=f"job-{i}", prompt=f"a fox, {i}", deadline_s=0.01, **PICTURE) for i in range(3)]
    recorder = run(pool, tmp_path, *specs, policy=policy)
    assert_nothing_failed(recorder)
    widest = max(len(ranks) for spec in specs for ranks in recorder.ranks_of(spec.id))
    assert widest >= {"legacy": 4}.get(policy, 2)


def failing(job_id, *, rank, step, times):
    return JobSpec(id=job_id, prompt=f"a fox | fail rank={rank} step={step} times={times}", **PICTURE)


@pytest.mark.parametrize("lookahead_s", [0.0, 1.0])
def test_a_failure_on_one_rank_of_a_group_costs_one_attempt(faulty_pool, tmp_path, lookahead_s):
    spec = failing(f"picture-{lookahead_s}", rank=1, step=2, times=1)
    calm = replace(spec, id="calm", prompt="calm")
    recorder = run(faulty_pool, tmp_path, spec, calm, policy=following((0, 1, 2)), lookahead_s=lookahead_s)
    failures = [e for e in recorder.events if isinstance(e, TaskFailed) and not e.void]
    assert {e.reason.split(" (")[0] for e in failures} == {"RuntimeError: as told by the prompt"}
    assert len({e.dispatch for e in failures}) == 1
    assert {o.status for o in recorder.outcomes} == {"done"}


def test_a_step_that_fails_twice_fails_its_job_and_no_other(faulty_pool, tmp_path):
    bad = failing("bad", rank=2, step=1, times=2)
    good = [replace(bad, id=f"good-{i}", prompt=f"fox {i}") for i in range(3)]
    recorder = run(faulty_pool, tmp_path, bad, *good, policy=following((0, 1), (2, 1), (1, 0, 2)))
    outcomes = {o.info.job_id: o for o in recorder.outcomes}
    assert outcomes.pop("bad").error.startswith("denoise 2 of 4: RuntimeError: as told by the prompt")
    assert {o.status for o in outcomes.values()} == {"done"}


@pytest.mark.parametrize("ranks", [(0,), (1, 0)], ids=str)
def test_latents_with_nan_fail_their_job_at_the_step_that_made_them(faulty_pool, tmp_path, ranks):
    spec = JobSpec(id=f"nan-{len(ranks)}", prompt="a fox | nan rank=0 step=2 times=2", **PICTURE)
    recorder = run(faulty_pool, tmp_path, spec, policy=following(ranks), lookahead_s=1.0)
    (outcome,) = recorder.outcomes
    assert outcome.status == "failed"
    assert outcome.error.startswith("denoise 3 of 4: NaN or infinity in the latents; ")
    assert not list(tmp_path.glob("nan*"))


@pytest.mark.parametrize("seed", range(4))
def test_failures_among_overlapping_groups_lose_nothing(faulty_pool, tmp_path, seed):
    random = Random(seed)
    specs = [
        failing(f"job-{seed}-{i}", rank=random.randrange(3), step=random.randrange(4), times=1)
        for i in range(6)
    ]
    layouts = [tuple(random.sample(range(3), random.randint(1, 3))) for _ in range(5)]
    lookahead_s = random.choice([0, 0.05, 1])
    recorder = run(faulty_pool, tmp_path, *specs, policy=following(*layouts), lookahead_s=lookahead_s)
    done = [o.info.job_id for o in recorder.outcomes if o.status == "done"]
    assert sorted(done) == sorted(spec.id for spec in specs)
