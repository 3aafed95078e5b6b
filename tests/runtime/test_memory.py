"""Memory that is short is told before anything starts, with numbers and what would help."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_job

from gfgen.errors import InputError
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.geometry.weight_files import read_header
from gfgen.models.geometry.weights import Footprint, device_bytes
from gfgen.runtime.core.devices import Devices, Gpu
from gfgen.session import memory
from gfgen.session.memory import GpuMemory, HostMemory, split
from gfgen.session.ranks import Ranks
from gfgen.system import machine as this_machine
from gfgen.system.machine import available_bytes, check_addresses

GB = 10**9
MEMINFO = "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:   800 kB\n"


def test_a_limit_below_what_any_rank_needs_is_refused(monkeypatch):
    monkeypatch.setattr(this_machine.resource, "getrlimit", lambda _: (1_024_000_000, -1))
    with pytest.raises(
        InputError, match=r"1\.0 GB of memory here \(ulimit -v\); each rank needs at least 1\.5 GB"
    ):
        check_addresses()
    monkeypatch.setattr(
        this_machine.resource, "getrlimit", lambda _: (this_machine.resource.RLIM_INFINITY, -1)
    )
    check_addresses()


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
    gpus = GpuMemory(devices=Devices("cuda", 1, (Gpu("a GPU", 40 * GB),)), has_random_weights=True)
    with pytest.raises(
        InputError, match=r"qwen-image \(57\.7 GB\): at least 58\.3 GB needed on each GPU, 40"
    ):
        gpus.weights([CONFIGS / "qwen-image", CONFIGS / "wan2.2-ti2v-5b"])


@pytest.mark.parametrize(
    ("model", "gpu_gb", "on_gpu_gb", "shape"),
    [
        ("wan2.2-ti2v-5b", 24, 12.8, {"width": 832, "height": 480, "frames": 49}),
        ("qwen-image", 48, 41.1, {"width": 1328, "height": 1328}),
        ("wan2.2-t2v-a14b", 48, 29.1, {"width": 832, "height": 480, "frames": 81}),
    ],
)
def test_offload_admits_models_on_gpus_that_cannot_hold_them_whole(
    model, gpu_gb, on_gpu_gb, shape, monkeypatch
):
    monkeypatch.setattr(memory, "available_bytes", lambda: 128 * GB)
    whole = Ranks(Devices("cuda", 1, (Gpu("a GPU", gpu_gb * GB),)), has_random_weights=True)
    spec = JobSpec(id="a", prompt="a red fox", line=1, **shape)
    with pytest.raises(InputError, match=rf"{model} .*, {gpu_gb}\.0 GB there; --offload would fit"):
        whole.admission(model)([spec])
    admission = replace(whole, is_offloaded=True).admission(model)
    (job,), problems = admission([spec])
    assert not problems
    weights = admission.memory.weights([job.checkpoint])
    assert weights[job.checkpoint] / GB == pytest.approx(on_gpu_gb, abs=0.1)


@pytest.mark.parametrize(
    ("model", "in_bf16_gb", "in_fp8_gb"),
    [("qwen-image", 57.7, 37.6), ("wan2.2-ti2v-5b", 24.2, 19.3), ("wan2.2-t2v-a14b", 69.0, 40.9)],
)
def test_transformers_in_fp8_count_half(model, in_bf16_gb, in_fp8_gb):
    devices = Devices("cuda", 1, (Gpu("a GPU", 141 * GB),))
    ranks = Ranks(devices, has_random_weights=True)
    checkpoint = ranks.admission(model).models.find(model).checkpoint
    sizes = [
        replace(ranks, precision=each).memory.weights([checkpoint])[checkpoint] for each in ((), ("fp8",))
    ]
    assert [size / GB for size in sizes] == pytest.approx([in_bf16_gb, in_fp8_gb], abs=0.2)


def test_main_memory_must_hold_what_is_offloaded_once_for_all_ranks_or_for_each(monkeypatch):
    # Text encoders are mapped; UMT5 takes 11.4 GB. Each rank has its own idle expert of 28.6 GB.
    folder = CONFIGS / "wan2.2-t2v-a14b"
    gpus = GpuMemory(devices=Devices("cuda", 4), has_random_weights=True, is_offloaded=True)
    monkeypatch.setattr(memory, "available_bytes", lambda: 126 * GB)
    gpus.check_offloaded([folder])
    monkeypatch.setattr(memory, "available_bytes", lambda: 125 * GB)
    message = r"--offload: wan2\.2-t2v-a14b on 4 ranks needs at least 125\.\d GB of main memory, 125\.0"
    with pytest.raises(InputError, match=message):
        gpus.check_offloaded([folder])


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
    devices = Devices("cuda", 2, (Gpu("a GPU", 80 * GB),), ranks_per_gpu=2)
    message = r"qwen-image .*needed for each of 2 ranks that share a GPU, 40\.0 GB there"
    with pytest.raises(InputError, match=message):
        GpuMemory(devices=devices, has_random_weights=True).weights([CONFIGS / "qwen-image"])
