"""Whether a LoRA fits a model: headers and diffusers' own loaders give the same answer."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from builders import read_jobs
from one_job import parse_job
from safetensors.torch import load_file, save_file

from gfgen.cli.shown.prediction import SimulatedMemory
from gfgen.errors import InputError, ModelError
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.job.fields import parse_fields
from gfgen.job.images import NoImages
from gfgen.job.reader import to_mapping
from gfgen.job.shared import parse_loras
from gfgen.job.spec import JobSpec
from gfgen.models.families.precision import Precision
from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.lora import accounting
from gfgen.models.lora.accounting import LoraFit, LoraFits, Match, by_headers
from gfgen.models.lora.reading import _name_sources, answer, weightless_pipeline
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CPU, CUDA, Devices, Gpu
from gfgen.runtime.ipc.settings import HOST_PLAN
from gfgen.session import memory as memory_module
from gfgen.session.admission import Admission
from gfgen.session.loras import Loras, PatchNeed, ServedLora, find_loras
from gfgen.session.memory import GpuMemory, HostMemory
from gfgen.session.ranks import Ranks

LAYER = "blocks.0.attn1.to_q"
GB = 10**9


def lora(path: Path, layer: str = f"transformer.{LAYER}", *, width: int) -> Path:
    factors = {"lora_A": torch.ones(2, width), "lora_B": torch.ones(width, 2)}
    save_file({f"{layer}.{name}.weight": factor for name, factor in factors.items()}, path)
    return path


@pytest.fixture(scope="module")
def width() -> int:
    """Of the built-in model."""
    config = json.loads((resolve_checkpoint("shapes") / "transformer" / "config.json").read_text())
    return int(config["num_attention_heads"] * config["attention_head_dim"])


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child process does."""

    def answers(module: str, asked: list[list[str]], what: str) -> list[dict[str, object]]:
        found = []
        for checkpoint, path in asked:
            try:
                found.append(answer(Path(checkpoint), Path(path)))
            except ModelError as error:
                found.append({"error": str(error)})
        return found

    monkeypatch.setattr(accounting, "ask_child", answers)


@pytest.mark.parametrize("model", ["shapes", "tiny-wan-moe"])
def test_headers_say_what_loaders_say(model: str, tmp_path: Path) -> None:
    checkpoint = resolve_checkpoint(model)
    config = weightless_pipeline(checkpoint).transformer.config
    path = lora(tmp_path / "a.safetensors", width=config.num_attention_heads * config.attention_head_dim)
    found = by_headers(checkpoint, path)
    assert found is not None
    by_child = answer(checkpoint, path)
    assert found.changed == by_child["changed"]
    assert list(found.components) == by_child["components"]


def test_headers_leave_other_formats_and_misfits_to_the_loaders(tmp_path: Path, width: int) -> None:
    checkpoint = resolve_checkpoint("shapes")
    vendor = lora(tmp_path / "a.safetensors", "diffusion_model.blocks.0.self_attn.q", width=width)
    narrow = lora(tmp_path / "b.safetensors", width=3)
    assert by_headers(checkpoint, vendor) is None
    assert by_headers(checkpoint, narrow) is None
    fits = LoraFits()
    fits.look([(checkpoint, "vendor", vendor), (checkpoint, "narrow", narrow)])
    assert set(fits.of(checkpoint, "vendor").changed) == {f"transformer.{LAYER}.weight"}
    assert f"other sizes of {LAYER}; this one is WanPipeline" in str(fits.of(checkpoint, "narrow").error)


def admission(memory: int | None = None) -> Admission:
    return Ranks(Devices(CPU, 2, memory_limit=memory)).admission("shapes")


def problems_of(tmp_path: Path, *entries: dict[str, str], memory: int | None = None) -> list[str]:
    specs = []
    for idx, entry in enumerate(entries):
        job = {"id": f"job{idx}", "prompt": "a red circle", "frames": 1, "lora": [entry]}
        spec, refused = parse_job(job, line=idx + 1, folder=tmp_path)
        assert spec is not None, refused
        specs.append(spec)
    _, problems = admission(memory)(specs)
    return [str(problem) for problem in problems]


def test_jobs_are_refused_for_misfits_and_unknown_targets(tmp_path: Path, width: int) -> None:
    lora(tmp_path / "ok.safetensors", width=width)
    lora(tmp_path / "other.safetensors", "transformer.single_blocks.3.to_q", width=width)
    found = problems_of(
        tmp_path,
        {"path": "ok.safetensors"},
        {"path": "other.safetensors"},
        {"path": "ok.safetensors", "target": "transformer_2"},
    )
    assert found == [
        f"line 2: lora: {tmp_path}/other.safetensors: made for another model, which has 2 tensors that fill "
        "nothing here: transformer.single_blocks.3.to_q.lora_A.weight, "
        "transformer.single_blocks.3.to_q.lora_B.weight; this one is WanPipeline",
        "line 3: lora.target = transformer_2: transformer is accepted for shapes",
    ]


def serve(found: Admission, served: Mapping[str, ServedLora], checkpoint: Path) -> None:
    found.memory.patches.serve(served, [checkpoint], found.memory)


def test_models_in_fp8_take_loras_of_jobs_and_servers(tmp_path: Path, width: int) -> None:
    path = lora(tmp_path / "ok.safetensors", width=width)
    spec, _ = parse_job({"prompt": "a red circle", "frames": 1, "lora": [str(path)]})
    assert spec is not None
    in_fp8 = on_gpus(80, precision=("fp8",), model="shapes")
    (job,), problems = in_fp8([spec])
    assert job.spec.lora
    assert not problems
    serve(in_fp8, find_loras([f"style={path}"]), job.checkpoint)


def test_a_truncated_file_is_refused(tmp_path: Path, width: int) -> None:
    path = lora(tmp_path / "cut.safetensors", width=width)
    path.write_bytes(path.read_bytes()[:-4])
    _, (problem,) = parse_job({"prompt": "a red circle", "lora": ["cut.safetensors"]}, folder=tmp_path)
    assert "cut.safetensors is no whole safetensors file" in str(problem)


def test_jobs_are_refused_if_copies_of_changed_weights_do_not_fit(tmp_path: Path, width: int) -> None:
    lora(tmp_path / "ok.safetensors", width=width)
    spec, _ = parse_job({"prompt": "a red circle", "frames": 1, "lora": ["ok.safetensors"]}, folder=tmp_path)
    assert spec is not None
    roomy = admission()
    (job,), _ = roomy([spec])
    memory, path = roomy.memory, job.checkpoint
    lora_bytes = memory.patch_bytes(path, memory.patches.of(path))
    assert lora_bytes == 2 * 4 * (width * width + 2 * 2 * width)  # on two ranks: a copy, and the factors
    need = memory.with_patches([path])[path] + memory.job_bytes(job)
    for limit, is_refused in ((need, False), (need - 1, True)):
        _, problems = admission(limit)([spec])
        assert ["copies of the weights that LoRAs change" in str(each) for each in problems] == [
            True
        ] * is_refused


def test_copies_take_memory_of_gpus_or_main_memory(tmp_path: Path) -> None:
    """On each of two ranks, copies of both experts' weight."""
    checkpoint = resolve_checkpoint("tiny-wan-moe")
    config = json.loads((checkpoint / "transformer" / "config.json").read_text())
    width = config["num_attention_heads"] * config["attention_head_dim"]
    path, fits = lora(tmp_path / "a.safetensors", width=width), LoraFits()
    fits.look([(checkpoint, "a", path)])
    for keeps_on_host, on_gpu, on_host in ((False, 2, 0), (True, 1, 2 * 2)):
        needs = Loras(fits, {checkpoint: PatchNeed(keeps_on_host)})
        memory = GpuMemory(devices=Devices(CUDA, 2), patches=needs)
        need = needs.of(checkpoint, {("a", None)})
        assert memory.patch_bytes(checkpoint, need) == 2 * (on_gpu * width * width + 2 * 2 * width)
        assert need.copies_bytes(2) == 2 * on_host * width * width


def test_a_model_in_fp8_needs_copies_in_bf16_and_memory_to_quantise(tmp_path: Path, width: int) -> None:
    checkpoint, fits = resolve_checkpoint("shapes"), LoraFits()
    fits.look([(checkpoint, "a", lora(tmp_path / "a.safetensors", width=width))])
    for keeps_on_host in (False, True):
        bf16, fp8 = (
            GpuMemory(devices=Devices(CUDA, 1), precision=Precision(asked)) for asked in ((), ("fp8",))
        )
        needs = Loras(fits, {checkpoint: PatchNeed(keeps_on_host)})
        need = needs.of(checkpoint, {("a", None)})
        more = fp8.patch_bytes(checkpoint, need) - bf16.patch_bytes(checkpoint, need)
        assert more == 14 * width * width
        assert fp8.patch_bytes(checkpoint, PatchNeed()) == 0


@pytest.fixture
def large_lora(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """A job of Qwen-Image with a LoRA of all 20.43 G parameters of the transformer."""
    changed = {f"transformer.{name}": 20_430_000_000 // 60 for name in range(60)}
    found = LoraFit(changed=changed, components=("transformer",))
    monkeypatch.setattr(accounting, "by_headers", lambda *_: found)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 50 * GB)
    path = lora(tmp_path / "all.safetensors", width=width)
    spec, _ = parse_job({"prompt": "a fox", "lora": [str(path)]})
    assert spec is not None
    return spec


def on_gpus(
    gpu_gb: int, *, num_ranks: int = 1, precision: tuple[str, ...] = (), model: str = "qwen-image"
) -> Admission:
    gpus = (Gpu("a GPU", gpu_gb * GB),) * num_ranks
    ranks = Ranks(
        Devices(CUDA, num_ranks, gpus),
        has_random_weights=model == "qwen-image",
        precision=Precision(precision),
    )
    return ranks.admission(model)


def test_copies_without_room_on_gpus_are_in_main_memory(
    large_lora: JobSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gfgen")
    for gpu_gb, is_on_host, precision in ((80, True, ()), (80, True, ("fp8",)), (141, False, ())):
        caplog.clear()
        found = on_gpus(gpu_gb, precision=precision)
        (job,), problems = found([large_lora])
        assert not problems
        assert list(found.memory.copies_on_host([job.checkpoint])) == [job.checkpoint] * is_on_host
        told = "so main memory has them (40.9 GB for 1 rank); a switch of LoRAs copies up to 40.9 GB to a GPU"
        assert (told in caplog.text) is is_on_host
        need = found.memory.patches.of(job.checkpoint)
        assert found.memory.patch_bytes(job.checkpoint, need) < 6 * GB or not is_on_host
    _, (problem,) = on_gpus(80, num_ranks=2)([large_lora])
    assert "at least 81.7 GB of main memory needed for copies of the weights that LoRAs change" in str(
        problem
    )


def test_copies_of_several_loras_share_main_memory(
    large_lora: JobSpec, tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each changes half of the parameters, of which main memory has room for the copies of one half."""

    def half(_: Path, path: Path) -> LoraFit:
        names = [f"transformer.{path.stem}.{name}" for name in range(30)]
        return LoraFit(changed=dict.fromkeys(names, 20_430_000_000 // 60), components=("transformer",))

    monkeypatch.setattr(accounting, "by_headers", half)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 30 * GB)
    first = lora(tmp_path / "first.safetensors", width=width)
    second = lora(tmp_path / "second.safetensors", width=2 * width)
    specs = []
    for number, path in enumerate((first, second, first)):
        spec, _ = parse_job({"id": f"job-{number}", "prompt": "a fox", "lora": [str(path)]}, line=number + 1)
        assert spec is not None
        specs.append(spec)
    jobs, (problem,) = on_gpus(80)(specs)
    assert [job.job_id for job in jobs] == ["job-0", "job-2"]
    assert str(problem).startswith("line 2: lora: at least 40.9 GB of main memory needed for copies")
    assert "30.0 GB available" in str(problem)


def test_a_mapped_weight_that_changes_is_counted_twice_and_others_once(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a model of which nothing was looked at before."""
    checkpoint, fits = resolve_checkpoint("shapes"), LoraFits()
    fits.look([(checkpoint, "a", lora(tmp_path / "a.safetensors", width=width))])
    memory = HostMemory(devices=Devices(CPU, 2), patches=Loras(fits))
    need = memory.patches.of(checkpoint, {("a", None)})
    for is_mapped, number in ((False, 1), (True, 2)):
        monkeypatch.setattr(memory_module, "_is_mapped", lambda _, is_mapped=is_mapped: is_mapped)
        assert memory.patch_bytes(checkpoint, need) == 2 * 4 * (number * width * width + 2 * 2 * width)
        assert memory.patch_bytes(checkpoint, PatchNeed()) == 0


def test_room_for_copies_is_what_arenas_leave_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HostMemory(devices=Devices(CPU, 2)).lacks(10**15, 0) is False
    for available, room in ((50 * GB, 50 * GB), (None, math.inf)):
        monkeypatch.setattr(memory_module, "available_bytes", lambda available=available: available)
        assert HostMemory(devices=Devices(CPU, 2)).copies_room([]) == room
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 50 * GB)
    over_host = GpuMemory(devices=Devices(CUDA, 2, transport="host"))
    assert over_host.arenas_on_host == 2 * arena_bytes(HOST_PLAN)
    assert over_host.copies_room([]) == 50 * GB - over_host.arenas_on_host
    over_host.is_loaded = True
    assert over_host.copies_room([]) == 50 * GB


def test_simulations_with_memory_take_jobs_with_loras(large_lora: JobSpec) -> None:
    (job,), _ = on_gpus(80)([large_lora])
    assert SimulatedMemory.of([job], "80GB", source="jobs").residency(1) is None


def test_jobs_that_come_later_find_copies_where_the_start_placed_them(large_lora: JobSpec) -> None:
    """Without jobs at the start, as on nodes, any weight may be changed later."""
    for gpu_gb, is_on_host in ((80, True), (141, False)):
        start = on_gpus(gpu_gb)
        checkpoint = start.models.find("qwen-image").checkpoint
        assert list(start.memory.copies_on_host([checkpoint])) == [checkpoint] * is_on_host
        later = start.of_loaded(frozenset({checkpoint}))
        for _ in range(2):
            _, problems = later([large_lora])
            assert not problems, "the second job needs no more copies"


def test_a_server_places_copies_for_all_its_loras_or_does_not_start(
    large_lora: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = find_loras([f"style={path}" for path in large_lora.lora_files or ()])
    found = on_gpus(80)
    checkpoint = found.models.find("qwen-image").checkpoint
    serve(found, served, checkpoint)
    assert list(found.memory.copies_on_host([checkpoint])) == [checkpoint]
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 1 * GB)  # the copies are there now
    _, problems = found.of_loaded(frozenset({checkpoint}))([large_lora])
    assert not problems
    with pytest.raises(InputError, match=r"at least 40\.9 GB of main memory needed for copies .* 1\.0 GB"):
        serve(on_gpus(80), served, checkpoint)


def test_each_rank_copies_streamed_blocks_in_fp8_that_loras_change(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gfgen")
    numbers = range(60)
    changed = {f"transformer.transformer_blocks.{idx}.attn.to_q.weight": 3072**2 for idx in numbers}
    changed["transformer.transformer_blocks.7.img_mod.1.weight"] = 6 * 3072**2  # in int8, and stays
    fit = LoraFit(changed=changed, components=("transformer",))
    monkeypatch.setattr(accounting, "by_headers", lambda *_: fit)
    spec, _ = parse_job({"prompt": "a fox", "lora": [str(lora(tmp_path / "a.safetensors", width=width))]})
    assert spec is not None
    for room_gb, is_refused in ((60, False), (30, True)):
        monkeypatch.setattr(memory_module, "available_bytes", lambda room=room_gb: room * GB)
        found = on_gpus(16, precision=("fp8",))
        jobs, problems = found([spec])
        assert ["main memory needed for copies" in str(each) for each in problems] == [True] * is_refused
        assert bool(jobs) is not is_refused
        (checkpoint,) = found.memory.patches.placements
        placement = found.memory.placement(checkpoint)
        streamed = placement.streamed["transformer"]
        assert placement.copied.keys() == {f"transformer.{key}" for key in streamed}
        need = found.memory.patches.of(checkpoint)
        if not is_refused:
            assert 0 < len(streamed) < 60
            assert need.copied == placement.copied
            assert need.changed.keys() == {name for name in changed if not placement.streams(name)}
            assert "transformer.transformer_blocks.7.img_mod.1.weight" in need.changed
            base = 2 * need.num_changed if need.is_on_host else 0
            assert need.copies_bytes(3) == 3 * (base + sum(need.copied.values()))
            assert found.memory.patch_bytes(checkpoint, need) >= 2 * 8 * 3072**2
    assert "of streamed blocks in fp8 from the model's files" in caplog.text


@pytest.mark.parametrize(
    ("gpu_gb", "main_gb", "lack"),
    [(40, 300, "43.0 GB of memory"), (80, 1, "40.9 GB of main memory"), (80, 300, "")],
)
def test_a_server_in_fp8_does_not_start_with_loras_that_do_not_fit(
    large_lora: JobSpec, monkeypatch: pytest.MonkeyPatch, gpu_gb: int, main_gb: int, lack: str
) -> None:
    monkeypatch.setattr(memory_module, "available_bytes", lambda: main_gb * GB)
    served = find_loras([f"style={path}" for path in large_lora.lora_files or ()])
    found = on_gpus(gpu_gb, precision=("fp8",))
    checkpoint = found.models.find("qwen-image").checkpoint
    expected = pytest.raises(InputError, match=f"at least {lack}") if lack else contextlib.nullcontext()
    with expected:
        serve(found, served, checkpoint)


def test_layers_that_a_model_lacks_are_left_out_with_a_warning_if_an_entry_says_so(
    tmp_path: Path, width: int
) -> None:
    path = lora(tmp_path / "more.safetensors", width=width)
    save_file(
        load_file(path) | load_file(lora(tmp_path / "k.safetensors", "transformer.k_img", width=2)), path
    )
    specs = []
    for partial in (False, True):
        entry = {"path": "more.safetensors"} | ({"partial": True} if partial else {})
        spec, refused = parse_job({"prompt": "a", "frames": 1, "lora": [entry]}, line=1, folder=tmp_path)
        assert spec is not None, refused
        assert to_mapping(spec)["lora"][0].get("partial", False) is partial
        specs.append(spec)
    (job,), (problem,) = admission()(specs)
    assert "2 tensors that fill nothing here: transformer.k_img.lora_A.weight" in str(problem)
    assert '"partial": true leaves them out' in str(problem)
    assert ["2 tensors that fill nothing" in str(warned) for warned in job.info.warnings] == [True]
    _, (problem,) = parse_job(
        {"prompt": "a", "lora": [{"path": "more.safetensors", "partial": 1}]}, folder=tmp_path
    )
    assert "partial is 1; true and false are accepted" in str(problem)


def test_problems_of_loras_are_found_once_for_all_jobs_with_them(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora(tmp_path / "ok.safetensors", width=width)
    job = {"prompt": "a red circle", "frames": 1, "lora": ["ok.safetensors"]}
    spec, _ = parse_job(job, folder=tmp_path)
    assert spec is not None
    changed_in = Mock(side_effect=LoraFit.changed_in, autospec=True)
    monkeypatch.setattr(LoraFit, "changed_in", lambda fit, target: changed_in(fit, target))
    jobs, _ = admission()([replace(spec, id=f"job{idx}") for idx in range(50)])
    assert len(jobs) == 50
    assert changed_in.call_count < 10


def test_a_request_names_a_lora_of_the_server(tmp_path: Path, width: int) -> None:
    path = lora(tmp_path / "ink.safetensors", width=width)
    served = find_loras([f"ink={path}"])
    serving = admission()
    serving.memory.patches.served.update(served)

    def requested(entry: dict[str, object]) -> tuple[Sequence[AdmittedJob], list[str]]:
        values, problems = parse_fields({"prompt": "a red circle", "lora": [entry]}, images=NoImages("no"))
        jobs, refused = serving([] if problems else [JobSpec(id="job", **values)])
        return jobs, [str(problem) for problem in (*problems, *refused)]

    ((job,), problems) = requested({"name": "ink", "scale": 0.5})
    assert not problems
    assert job.spec.lora == [{"sha256": served["ink"].sha256, "scale": 0.5}]
    assert job.spec.lora_files == [str(path)]
    assert requested({"name": "oil"})[1] == ["lora = oil: is no LoRA of this server; there are ink"]
    assert "paths are not accepted over HTTP" in requested({"path": str(path)})[1][0]


def test_the_option_counts_after_lines_and_defaults_and_null_is_none(tmp_path: Path, width: int) -> None:
    paths = [lora(tmp_path / f"{name}.safetensors", width=width) for name in ("option", "default", "line")]
    lines: list[dict[str, object]] = [{"prompt": "one"}, {"prompt": "two", "lora": ["line.safetensors"]}]
    lines.append({"prompt": "three", "lora": None})
    found = {}
    for defaults in ({}, {"lora": ["default.safetensors"]}):
        first = [{"defaults": defaults}] if defaults else []
        file = tmp_path / "jobs.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in (*first, *lines)))
        parsed = read_jobs(file, fallbacks={"lora": parse_loras([f"{paths[0]}:0.5"])})
        assert not parsed.problems
        found[bool(defaults)] = [spec.lora_files for spec in parsed.specs]
        again, _ = parse_job(to_mapping(parsed.specs[0]))
        assert again is not None
        assert (again.lora, again.lora_files) == (parsed.specs[0].lora, parsed.specs[0].lora_files)
    option, default, line = ([str(path)] for path in paths)
    assert found == {False: [option, line, None], True: [default, line, None]}


def test_an_alpha_that_a_converter_gives_to_no_layer_is_a_problem():
    match = Match(odd=["unet.a.alpha"])
    _name_sources(
        match, {"unet.a.alpha": set(), "": {"lora_unet_a.alpha"}}, {"lora_unet_a.alpha": torch.ones(())}
    )
    assert match.odd == ["unet.a.alpha"]
