"""Memory that is short is told before anything starts, with numbers and what would help."""

import errno
import math
import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from builders import make_job

from gfgen.errors import InputError
from gfgen.job.spec import JobSpec
from gfgen.models.families.precision import Precision
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.geometry.weight_files import read_header
from gfgen.models.geometry.weights import Footprint, device_bytes
from gfgen.runtime.core.devices import Devices, Gpu
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.processes.child import Child
from gfgen.session import memory
from gfgen.session.memory import GpuMemory, HostMemory, split
from gfgen.session.ranks import AskedRanks, Ranks
from gfgen.system import machine as this_machine
from gfgen.system.machine import RANK_BYTES, RUN_BYTES, available_bytes, check_code_memory, check_limits

GB = 10**9
MEMINFO = "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:   800 kB\n"


def limited_to(monkeypatch, kind, soft, hard):
    limits = {kind: (soft, hard)}
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, none))
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    return limits


def test_a_limit_of_files_is_raised_as_far_as_it_may_be(monkeypatch):
    limits = limited_to(monkeypatch, resource.RLIMIT_FSIZE, 1000, 10**12)
    check_limits()
    assert limits[resource.RLIMIT_FSIZE] == (10**12, 10**12)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EFBIG, r"files of 134\.2 MB are too large\); raise ulimit -f"),
        (errno.EPERM, r"memfd_create: Operation not permitted\); a container or sandbox has to allow it"),
        (errno.ENOSYS, r"memfd_create: Function not implemented"),
    ],
)
def test_shared_memory_that_is_refused_is_one_line(monkeypatch, number, words):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(InputError, match=f"shared memory is refused here .*{words}"):
        check_limits()


def test_a_sandbox_in_which_no_code_can_be_made_is_one_line(monkeypatch):
    check_code_memory()
    monkeypatch.setattr("mmap.mmap", Mock(side_effect=PermissionError))
    with pytest.raises(InputError, match="MemoryDenyWriteExecute=no"):
        check_code_memory()


def test_ranks_whose_processes_do_not_fit_are_refused_with_how_many_would(monkeypatch):
    room = RUN_BYTES + 2 * RANK_BYTES
    monkeypatch.setattr(this_machine, "available_bytes", lambda: room)
    check_limits(2)
    with pytest.raises(InputError, match=r"4 ranks: about .* needed without models, .*; --ranks 2 would fit"):
        check_limits(4)
    monkeypatch.setattr(this_machine, "available_bytes", lambda: RUN_BYTES)
    with pytest.raises(InputError, match=r"1 rank: about .*; free memory, or raise the limit"):
        check_limits(1)


def test_texts_that_libraries_need_may_not_be_removed(monkeypatch):
    monkeypatch.setattr(this_machine.sys, "flags", SimpleNamespace(optimize=2))
    with pytest.raises(InputError, match=r"PYTHONOPTIMIZE=2 \(python -OO\) .*: unset it"):
        check_limits()


@pytest.fixture
def machine(tmp_path):
    """Writes files of a machine: path -> content."""

    def write(**files):
        for name, content in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return write


def test_a_machine_without_limits_has_what_it_says(machine):
    assert available_bytes(machine()) == 800 * 1024


def test_a_system_that_does_not_say_counts_as_unknown(tmp_path):
    assert available_bytes(tmp_path) is None


def test_the_tightest_cgroup_counts_and_its_page_cache_is_room(machine):
    root = machine(
        **{
            "proc/self/cgroup": "0::/user/gfgen\n",
            "sys/fs/cgroup/user/memory.max": "500000\n",
            "sys/fs/cgroup/user/memory.current": "300000\n",
            "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 50000\nactive_file 10000\n",
            "sys/fs/cgroup/user/gfgen/memory.max": "max\n",
            "sys/fs/cgroup/user/gfgen/memory.current": "100\n",
        }
    )
    assert available_bytes(root) == 260000


def test_limits_of_the_older_cgroups_count_too(machine):
    root = machine(
        **{
            "proc/self/cgroup": "4:memory:/job\n1:cpu:/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "400000\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        }
    )
    assert available_bytes(root) == 300000


CONTAINER = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": "600000000\n",
    "sys/fs/cgroup/memory.events": "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
}
OLD_CONTAINER = {
    "proc/self/cgroup": "4:memory:/docker/f00\n2:cpuacct,cpu:/docker/f00\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "600000000\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
"""Its path is that of the host, which it does not see."""
OF_A_JOB = {
    "proc/self/cgroup": "0::/slurm/job_1\n",
    "sys/fs/cgroup/slurm/memory.max": "max\n",
    "sys/fs/cgroup/slurm/memory.events": "oom_kill 9\n",
    "sys/fs/cgroup/slurm/cpu.max": "max 100000\n",
    "sys/fs/cgroup/slurm/job_1/memory.max": "600000000\n",
    "sys/fs/cgroup/slurm/job_1/memory.events": "oom_kill 2\n",
    "sys/fs/cgroup/slurm/job_1/cpu.max": "150000 100000\n",
}


@pytest.mark.parametrize("files", [CONTAINER, OLD_CONTAINER, OF_A_JOB], ids=["v2", "v1", "below"])
def test_limits_quotas_and_kills_of_containers_and_batch_jobs_are_read(machine, files):
    root = machine(**files)
    assert this_machine.memory_limit(root) == 600_000_000
    assert this_machine.cpu_quota(root) == 1.5
    assert this_machine.oom_kills(root) == 2


def test_without_cgroups_there_are_no_limits(machine):
    root = machine(**{"proc/self/cgroup": "1:cpu:/\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"})  # fmt: skip
    assert (this_machine.memory_limit(root), this_machine.cpu_quota(root), this_machine.oom_kills(root)) == (
        None,
        None,
        0,
    )


def test_the_number_of_ranks_and_the_name_of_the_cpu_follow_the_limits(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(this_machine, "cpu_quota", lambda: None)
    monkeypatch.setattr(this_machine, "available_bytes", lambda: None)
    assert (this_machine.fitting_ranks(4), this_machine.num_cores()) == (4, 8)
    assert this_machine.cpu_name().startswith("8 cores of ")
    monkeypatch.setattr(this_machine, "cpu_quota", lambda: 1.5)
    assert (this_machine.fitting_ranks(4), this_machine.num_cores()) == (2, 2)
    assert this_machine.cpu_name().startswith("1.5 cores of ")
    monkeypatch.setattr(this_machine, "available_bytes", lambda: RUN_BYTES + 3 * RANK_BYTES // 2)
    assert this_machine.fitting_ranks(4) == 1
    monkeypatch.setattr(this_machine, "available_bytes", lambda: 1000)
    assert this_machine.fitting_ranks(4) == 1
    assert AskedRanks(device="cpu").here().num_ranks == 1
    assert AskedRanks(device="cpu", ranks=3).here().num_ranks == 3


@pytest.mark.parametrize(("exitcode", "is_named"), [(-9, True), (255, True), (-11, False), (1, False)])
def test_a_process_that_the_kernel_killed_for_lack_of_memory_is_named(monkeypatch, exitcode, is_named):
    monkeypatch.setattr(this_machine, "oom_kills", lambda: 3)
    monkeypatch.setattr(this_machine, "memory_limit", lambda: 600_000_000)
    process = SimpleNamespace(join=lambda _: None, is_alive=lambda: False, exitcode=exitcode)
    channel = SimpleNamespace(close=lambda: None)
    for kills_before, verdict in ((2, None), (3, None), (2, "it hangs")):
        state = {"oom_kills": kills_before, "verdict": verdict}
        child = Child(name="rank 0", process=process, channel=channel, **state)
        ending = child.reap(patience_s=0.0)
        expected = "killed for lack of memory (the limit is 600.0 MB); fewer --ranks, smaller jobs or"
        assert ending.startswith(expected) == (is_named and (kills_before, verdict) == (2, None))


@pytest.fixture
def bf16_model(monkeypatch):
    monkeypatch.setattr(memory, "footprint", lambda _: Footprint(shared_bytes=2 * GB, private_bytes=5 * GB))
    return [Path("wan")]


def on_cpus(num_ranks, room, monkeypatch, **options):
    monkeypatch.setattr(memory, "available_bytes", lambda: room)
    return HostMemory(devices=Devices("cpu", num_ranks), **options)


def test_models_that_fit_tell_what_they_take(bf16_model, monkeypatch):
    assert on_cpus(4, 22 * GB, monkeypatch).weights(bf16_model) == {Path("wan"): 22 * GB}
    assert on_cpus(4, None, monkeypatch).weights(bf16_model) == {Path("wan"): 22 * GB}


def test_models_that_do_not_fit_say_how_many_ranks_would(bf16_model, monkeypatch):
    message = r"wan on 4 ranks: at least 22.0 GB of memory needed, 14.0 GB available; --ranks 2 would fit"
    with pytest.raises(InputError, match=message):
        on_cpus(4, 14 * GB, monkeypatch).weights(bf16_model)
    with pytest.raises(InputError, match="free memory, raise --memory, or run smaller models"):
        on_cpus(4, 1 * GB, monkeypatch).weights(bf16_model)


def test_models_need_fit_together_only_where_all_are_to_be_there_at_once(bf16_model, monkeypatch):
    models = [*bf16_model, Path("qwen")]
    on_cpus(1, 7 * GB, monkeypatch).weights(models)
    on_cpus(1, 14 * GB, monkeypatch).check_together(models)
    with pytest.raises(InputError, match=r"qwen, wan: at least 14\.0 GB of memory needed for all"):
        on_cpus(1, 13 * GB, monkeypatch).check_together(models)


def test_only_jobs_that_cannot_fit_are_refused():
    jobs = [make_job("a", line=3), make_job("b", line=4)]
    assert split(jobs, lambda _: GB, GB) == (jobs, [])
    kept, problems = split(jobs, lambda _: GB + 1, GB)
    assert kept == []
    assert [problem.line for problem in problems] == [3, 4]
    expected = (
        "line 3: size = 16x16: at least 1.0 GB of memory needed, 1.0 GB available; a smaller size would help"
    )
    assert str(problems[0]) == expected
    assert split(jobs, lambda _: GB, None) == (jobs, ())


def test_a_job_whose_frames_exceed_the_limit_of_a_file_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "footprint", lambda _: Footprint(shared_bytes=GB, private_bytes=0))
    jobs, frames_bytes = [make_job("a", line=3)], memory._largest_file_bytes(make_job("a"))
    for most, number in ((frames_bytes, 0), (frames_bytes - 1, 1)):
        limited_to(monkeypatch, resource.RLIMIT_FSIZE, most, most)
        _, problems = on_cpus(1, 14 * GB, monkeypatch).fit(jobs)
        assert len(problems) == number
    assert "in one file (ulimit -f) needed" in str(problems[0])


def test_a_job_on_cpus_needs_its_model_unless_that_is_loaded(monkeypatch):
    job = make_job("a")
    monkeypatch.setattr(memory, "footprint", lambda _: Footprint(shared_bytes=GB, private_bytes=0))
    need = GB + HostMemory(devices=Devices("cpu", 1)).job_bytes(job)
    assert on_cpus(1, need, monkeypatch).fit([job]) == ([job], ())
    kept, problems = on_cpus(1, need - 1, monkeypatch).fit([job])
    assert (kept, len(problems)) == ([], 1)
    assert on_cpus(1, need - GB, monkeypatch, is_loaded=True).fit([job]) == ([job], ())


def test_shipped_models_have_the_weights_on_a_gpu_that_were_measured():
    # Measured on an H200: Wan2.2-5B with UMT5 and VAE takes 24 GB, Qwen-Image 58 GB.
    expected = {CONFIGS / "wan2.2-ti2v-5b": 24.2, CONFIGS / "qwen-image": 57.7}
    found = GpuMemory(devices=Devices("cuda", 1), has_random_weights=True).weights(expected)
    assert {path: size / 1e9 for path, size in found.items()} == pytest.approx(expected, abs=0.1)


def test_random_weights_take_of_main_memory_what_the_parameters_take_in_fp32(monkeypatch):
    folder = CONFIGS / "qwen-image"
    found = on_cpus(2, None, monkeypatch, has_random_weights=True).weights([folder])
    assert found[folder] / 1e9 == pytest.approx(2 * 2 * 57.7, abs=0.5)
    message = r"qwen-image on 2 ranks: at least 230.* --ranks 1 would fit"
    with pytest.raises(InputError, match=message):
        on_cpus(2, 150 * GB, monkeypatch, has_random_weights=True).weights([folder])


def test_a_model_too_large_for_a_gpu_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(GpuMemory, "beside_bytes", 600_000_000)
    gpus = GpuMemory(devices=Devices("cuda", 1, (Gpu("a GPU", 16 * GB),)), has_random_weights=True)
    message = r"qwen-image \(57\.7 GB\): at least 17\.7 GB needed on each GPU even if all of .* streamed, 16"
    with pytest.raises(InputError, match=message):
        gpus.weights([CONFIGS / "qwen-image", CONFIGS / "wan2.2-ti2v-5b"])


@pytest.mark.parametrize(
    ("model", "gpu_gb", "on_gpu_gb", "streamed_gb", "shape"),
    [
        ("wan2.2-ti2v-5b", 16, 5.9, 19.1, {"width": 832, "height": 480, "frames": 49}),
        ("wan2.2-ti2v-5b", 48, 24.2, 0, {"width": 832, "height": 480, "frames": 49}),
        ("qwen-image", 24, 20.3, 38.8, {"width": 1024, "height": 1024}),
        ("wan2.2-t2v-a14b", 24, 12.7, 58.5, {"width": 832, "height": 480, "frames": 81}),
    ],
)
def test_gpus_hold_as_many_blocks_as_fit_beside_a_job_and_main_memory_holds_the_others(
    model, gpu_gb, on_gpu_gb, streamed_gb, shape, monkeypatch
):
    monkeypatch.setattr(memory, "available_bytes", lambda: 128 * GB)
    ranks = Ranks(Devices("cuda", 1, (Gpu("a GPU", gpu_gb * GB),)), has_random_weights=True)
    admission = ranks.admission(model)
    (job,), problems = admission([JobSpec(id="a", prompt="a red fox", line=1, **shape)])
    assert not problems
    weights = admission.memory.weights([job.checkpoint])
    assert weights[job.checkpoint] / GB == pytest.approx(on_gpu_gb, abs=0.1)
    assert admission.memory.check_waiting([job.checkpoint]) / GB == pytest.approx(streamed_gb, abs=0.1)
    loaded = replace(admission.memory, is_loaded=True)
    loaded.fit([replace(job, limits=replace(job.limits, max_sequence_degree=10**6))])
    assert loaded.placement(job.checkpoint) == admission.memory.placement(job.checkpoint)


def test_what_is_streamed_is_said_with_the_time_of_its_reads(monkeypatch, caplog):
    monkeypatch.setattr(memory, "available_bytes", lambda: 128 * GB)
    ranks = Ranks(Devices("cuda", 1, (Gpu("a GPU", 24 * GB),)), has_random_weights=True)
    admission = ranks.admission("qwen-image")
    (job,), _ = admission([JobSpec(id="a", prompt="a red fox", line=1, width=1024, height=1024)])
    with caplog.at_level("INFO"):
        admission.memory.streaming([job.checkpoint])
    assert caplog.messages == [
        "qwen-image: each GPU holds 20.3 GB of its weights; 38.8 GB are streamed from main memory, "
        "which takes a forward at least 0.49 s"
    ]


@pytest.mark.parametrize("peers", [None, frozenset()], ids=["peers", "no peers"])
def test_gpus_with_peer_access_keep_blocks_for_each_other(peers, monkeypatch, caplog):
    monkeypatch.setattr(memory, "available_bytes", lambda: 128 * GB)
    gpus = (Gpu("a GPU", 36 * GB, peers),) * 2
    devices = Devices("cuda", 2, gpus, transport="peer")
    admission = Ranks(devices, has_random_weights=True).admission("qwen-image")
    (job,), _ = admission([JobSpec(id="a", prompt="a red fox", line=1, width=1024, height=1024)])
    placement = admission.memory.placement(job.checkpoint)
    assert {name: len(keys) for name, keys in placement.shared.items()} == (
        {"transformer": 54} if peers is None else {}
    )
    with caplog.at_level("INFO"):
        admission.memory.streaming([job.checkpoint])
    assert ("from main memory and from other GPUs" in caplog.text) == (peers is None)
    assert admission.memory.weights([job.checkpoint])[job.checkpoint] <= 32 * GB


def test_models_that_may_take_turns_keep_no_blocks_for_each_other(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 256 * GB)
    gpus = (Gpu("a GPU", 36 * GB),) * 2
    admission = Ranks(Devices("cuda", 2, gpus), has_random_weights=True).admission("qwen-image")
    specs = [
        JobSpec(id=model, prompt="a red fox", line=1, model=model, width=832, height=480)
        for model in ("qwen-image", "wan2.2-t2v-a14b")
    ]
    jobs, _ = admission(specs)
    assert not any(admission.memory.placement(job.checkpoint).shared for job in jobs)


def test_without_main_memory_for_what_is_shared_less_is_streamed(monkeypatch):
    gpus = (Gpu("a GPU", 56 * GB),) * 2
    monkeypatch.setattr(memory, "available_bytes", lambda: 12 * GB)
    devices = Devices("cuda", 2, gpus, transport="peer")
    admission = Ranks(devices, has_random_weights=True).admission("qwen-image")
    (job,), _ = admission([JobSpec(id="a", prompt="a red fox", line=1, width=1024, height=1024)])
    placement = admission.memory.placement(job.checkpoint)
    assert not placement.shared
    assert 0 < placement.streamed_bytes < 12 * GB


def test_without_main_memory_for_any_way_a_file_has_what_gpus_keep_for_each_other(monkeypatch):
    gpus = (Gpu("a GPU", 40 * GB),) * 4
    monkeypatch.setattr(memory, "available_bytes", lambda: 12 * GB)
    admission = Ranks(Devices("cuda", 4, gpus), has_random_weights=True).admission("qwen-image")
    (job,), problems = admission([JobSpec(id="a", prompt="a red fox", line=1, width=1024, height=1024)])
    assert not problems
    placement = admission.memory.placement(job.checkpoint)
    assert placement.is_on_disk
    assert placement.shared == placement.streamed
    assert placement.streamed_bytes > 12 * GB
    text = admission.memory.in_words(job.checkpoint)
    assert re.search(
        r"from a file, because main memory has no room \(a forward would take about .* s longer\)", text
    )


@pytest.mark.parametrize(
    ("model", "in_bf16_gb", "in_fp8_gb"),
    [("qwen-image", 57.7, 37.6), ("wan2.2-ti2v-5b", 24.2, 19.3), ("wan2.2-t2v-a14b", 69.0, 40.9)],
)
def test_transformers_in_fp8_count_half(model, in_bf16_gb, in_fp8_gb):
    devices = Devices("cuda", 1, (Gpu("a GPU", 141 * GB),))
    ranks = Ranks(devices, has_random_weights=True)
    checkpoint = ranks.admission(model).models.find(model).checkpoint
    sizes = [
        replace(ranks, precision=Precision(each)).memory.weights([checkpoint])[checkpoint]
        for each in ((), ("fp8",))
    ]
    assert [size / GB for size in sizes] == pytest.approx([in_bf16_gb, in_fp8_gb], abs=0.2)


def test_main_memory_must_hold_what_is_streamed_once_for_all_ranks(monkeypatch):
    folder = CONFIGS / "wan2.2-t2v-a14b"
    gpus = GpuMemory(devices=Devices("cuda", 4, (Gpu("a GPU", 24 * GB),) * 4), has_random_weights=True)
    monkeypatch.setattr(memory, "available_bytes", lambda: 53 * GB)
    assert gpus.check_waiting([folder]) == gpus.placement(folder).streamed_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda: 50 * GB)
    message = r"wan2\.2-t2v-a14b: 5\d\.\d GB of main memory needed for weights that GPUs lack room for, 50\.0"
    with pytest.raises(InputError, match=message):
        gpus.check_waiting([folder])


def test_main_memory_must_hold_arenas_beside_what_is_streamed(monkeypatch):
    folder = CONFIGS / "wan2.2-t2v-a14b"
    alone = (Gpu("a GPU", 24 * GB, frozenset()),) * 4
    gpus = GpuMemory(devices=Devices("cuda", 4, alone), has_random_weights=True)
    streamed = gpus.placement(folder).streamed_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda: streamed + gpus.arenas_on_host)
    assert gpus.check_waiting([folder]) == streamed
    monkeypatch.setattr(memory, "available_bytes", lambda: streamed + gpus.arenas_on_host - 1)
    with pytest.raises(
        InputError, match=r"GPUs lack room for and 4\.\d GB for exchanges \(none with --transport peer\), "
    ):
        gpus.check_waiting([folder])
    gpus.is_loaded = True  # and has pinned them
    assert gpus.check_waiting([folder]) == streamed


def test_main_memory_must_hold_what_is_streamed_of_all_models_that_take_turns(monkeypatch):
    folders = [CONFIGS / "wan2.2-t2v-a14b", CONFIGS / "qwen-image"]
    gpus = GpuMemory(devices=Devices("cuda", 1, (Gpu("a GPU", 24 * GB),)), has_random_weights=True)
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 * GB)
    for folder in folders:
        assert gpus.check_waiting([folder])
    with pytest.raises(InputError, match=r"qwen-image, wan2\.2-t2v-a14b: 87\.9 GB of main memory needed"):
        gpus.check_waiting(folders)


@pytest.mark.parametrize(
    ("available_gb", "names"),
    [(120, {"qwen-image", "wan2.2-ti2v-5b"}), (80, {"wan2.2-ti2v-5b"}), (20, set())],
)
def test_models_that_take_turns_stay_in_main_memory_as_far_as_it_has_room(
    monkeypatch, caplog, available_gb, names
):
    caplog.set_level("INFO")
    folders = [CONFIGS / "qwen-image", CONFIGS / "wan2.2-ti2v-5b"]
    gpus = GpuMemory(devices=Devices("cuda", 2, (Gpu("a GPU", 80 * GB),) * 2), has_random_weights=True)
    monkeypatch.setattr(memory, "available_bytes", lambda: available_gb * GB)
    found = gpus.kept(folders)
    assert {path.name for path in found} == names
    assert found.items() <= gpus.weights(folders).items()
    assert ("main memory keeps copies of wan2.2-ti2v-5b" in caplog.text) == bool(names)
    monkeypatch.setattr(memory, "available_bytes", lambda: 120 * GB)
    small = GpuMemory(devices=Devices("cuda", 1, (Gpu("a GPU", 24 * GB),)), has_random_weights=True)
    assert CONFIGS / "qwen-image" not in small.kept(folders[:1]), "what is streamed has a copy of its own"
    assert not HostMemory(devices=Devices("cpu", 2)).kept(folders)


def test_weights_of_a_checkpoint_on_a_gpu_are_counted_from_its_files(tiny_models):
    folder = tiny_models["tiny-wan"]
    counts = {
        path.parent.name: sum(math.prod(entry["shape"]) for entry in read_header(path).values())
        for path in folder.glob("*/*.safetensors")
    }
    wide = counts.pop("vae")
    assert sum(device_bytes(folder).values()) == 4 * wide + 2 * sum(counts.values())


def test_a_job_too_large_for_a_gpu_is_refused_with_the_numbers(monkeypatch):
    job = make_job("a")
    monkeypatch.setattr(GpuMemory, "beside_bytes", 3 * GB)

    def gpus(size_bytes):
        return GpuMemory(devices=Devices("cuda", 1, (Gpu("a GPU", size_bytes),)))

    weights = {job.checkpoint: 7 * GB, Path("another"): 90 * GB}
    need = 10 * GB + gpus(0).job_bytes(job)
    assert gpus(need).on_gpus([job], weights) == ([job], [])
    kept, problems = gpus(need - 1).on_gpus([job], weights)
    assert kept == []
    assert "on each GPU needed, 10.0 GB available" in str(problems[0])


def test_ranks_that_share_a_gpu_have_a_part_of_it_each():
    devices = Devices("cuda", 2, (Gpu("a GPU", 30 * GB),), ranks_per_gpu=2)
    message = r"qwen-image .*needed for each of 2 ranks that share a GPU even if .*, 15\.0 GB there"
    with pytest.raises(InputError, match=message):
        GpuMemory(devices=devices, has_random_weights=True).weights([CONFIGS / "qwen-image"])


def test_peaks_that_were_measured_replace_guesses(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 128 * GB)

    def streamed_gb(peaks, vae_dtype="auto"):
        ranks = Ranks(
            Devices("cuda", 1, (Gpu("a GPU", 24 * GB),)), has_random_weights=True, vae_dtype=vae_dtype
        )
        admission = ranks.admission("wan2.2-ti2v-5b")
        named = {f"wan2.2-ti2v-5b {name}": size for name, size in peaks.items()}
        admission.memory.profile = Profile("a GPU", "2026-11-28", "a test", 1, (), peaks=named)
        fields = {"width": 832, "height": 480, "frames": 49}
        (job,), _ = admission([JobSpec(id="a", prompt="a red fox", line=1, **fields)])
        return admission.memory.placement(job.checkpoint).streamed_bytes / GB

    shape = "832x480x49+cfg"
    guessed_gb = streamed_gb({})
    assert streamed_gb({f"{shape} decode": 2 * GB}) < guessed_gb, "100 bytes a sample are 5.9 GB"
    assert streamed_gb({f"{shape} denoise": 9 * GB}) > guessed_gb
    assert streamed_gb({f"{shape} encode": 9 * GB}) > guessed_gb
    assert streamed_gb({"64x64x5 denoise": 9 * GB}) == guessed_gb
    half_gb = streamed_gb({}, "bfloat16")
    assert streamed_gb({f"{shape} decode": 9 * GB}, "bfloat16") == half_gb
    assert streamed_gb({f"{shape} decode bfloat16": 9 * GB}, "bfloat16") > half_gb
