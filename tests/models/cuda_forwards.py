"""Programs that CUDA ranks run in tests: steps launch by launch and as records, on all kinds of layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.descriptor import Descriptor
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families import guidance
from gfgen.models.families.adapter import Fields
from gfgen.models.families.registry import find_configs, load_adapter
from gfgen.models.fast import recording as graphs_module
from gfgen.models.fast import texts
from gfgen.models.fast.evaluation import evaluate
from gfgen.models.fast.recording import Graphs
from gfgen.models.parallel.cudnn_attention import is_fast
from gfgen.models.parallel.parallel import Parallel, parallel_from, rehearsal
from gfgen.models.stepping.adapter import PipelineAdapter
from gfgen.runtime.ipc.messages import WarmUp
from gfgen.runtime.worker.forwards import CudaRecorder, Forwards

WAN = {"width": 96, "height": 64, "frames": 9}  # 18 tokens: 5, 5, 4, 4 on four ranks
QWEN = {"width": 96, "height": 96, "true_cfg_scale": 4.0}  # 36 tokens


SMALL = {"width": 64, "height": 64, "guidance_scale": 3.0}


@dataclass(frozen=True)
class Job:
    model: str
    """A model's name, or the class of a pipeline (tests/small_checkpoints.py)."""
    fields: Mapping[str, Any]
    has_image: bool = False
    in_batch: bool = False
    """Both branches in one forward."""

    @property
    def is_pipeline(self) -> bool:
        return self.model.endswith("Pipeline")


JOBS = {
    "wan": Job("tiny-wan", WAN),
    "wan, with an image": Job("tiny-wan", WAN, has_image=True),
    "wan, in one forward": Job("tiny-wan", WAN, in_batch=True),
    "wan, with an image, in one forward": Job("tiny-wan", WAN, has_image=True, in_batch=True),
    "shapes, with an image": Job("shapes", {**WAN, "guidance_scale": 3.0}, has_image=True),
    "qwen": Job("tiny-qwen-image", QWEN),
    "qwen, in one forward": Job("tiny-qwen-image", QWEN, in_batch=True),
    "flux": Job("FluxPipeline", {**SMALL, "negative_prompt": "dark", "true_cfg_scale": 3.0}),
    "flux2": Job("Flux2KleinPipeline", SMALL),
    "ltx": Job("LTXPipeline", {**SMALL, "frames": 9}),
    "sd3": Job("StableDiffusion3Pipeline", SMALL),
    "sdxl": Job("StableDiffusionXLPipeline", SMALL),
}
STEPS = 4
TEXTS = ("a fox", "a fox in the snow", "two foxes below a tree in the snow at night")
PASSES = 3
"""Over each step."""


def recording_always() -> Any:
    """Inside, each forward is recorded: ranks that share a GPU measure each other's times."""
    return patch.object(graphs_module, "WORTH_RECORDING", 0.0)


class CountingRecorder(CudaRecorder):
    """How often what was recorded is replayed."""

    num_replays = 0

    def record(self, function: Any, parallel: Any) -> Any:
        recorded = super().record(function, parallel)

        def replay(parallel: Any) -> torch.Tensor:
            self.num_replays += 1
            return recorded(parallel)

        return replay


def use_own_stream(endpoint: CudaEndpoint) -> torch.device:
    """From here on, as a worker does: its rank's device, and a stream that is not torch's first."""
    device = endpoint.torch_device
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return device


@torch.no_grad()
def compare(
    endpoint: CudaEndpoint, name: str, picture: str, checkpoint: str, layouts: Sequence[Layout], first: int
) -> dict[str, int]:
    """Each step on each layout, launch by launch, as records, and mixed: results that differ, replays, ..."""
    job = JOBS[name]
    asked = JobSpec(id="job", prompt="a fox", seed=1, steps=STEPS, **job.fields)
    asked = replace(asked, image=picture if job.has_image else None)
    with patch.object(guidance, "is_batch_faster", return_value=job.in_batch), recording_always():
        return _compare(endpoint, checkpoint or job.model, asked, layouts, first)


def _compare(
    endpoint: CudaEndpoint, model: str, asked: JobSpec, layouts: Sequence[Layout], first: int
) -> dict[str, int]:
    device = use_own_stream(endpoint)
    adapter: Any = load_adapter(
        find_configs(model), device=str(device), has_random_weights="/" not in model, kernels="fused"
    )
    spec = adapter.geometry.resolve(asked)
    recorder = CountingRecorder(device)
    graphs, launching = Graphs(recorder, device), Graphs(recorder, device, may_record=False)

    def unentered(layout: Layout) -> Parallel | None:
        return None if layout.degree == 1 else parallel_from(endpoint.unentered(layout))

    forwards = Forwards({model: adapter}, graphs, rank=endpoint.rank, unentered=unentered)
    list(forwards.warm_up(WarmUp(0, spec, model, tuple({layout.degrees: None for layout in layouts}))))
    torch.cuda.synchronize()
    prompt = adapter.encode(spec)
    condition, start = adapter.prepare(spec, prompt)
    num_different = num_replays = num_steps = 0
    for idx, layout in enumerate(layouts):
        if endpoint.rank not in layout.ranks:
            continue
        latents = start
        for step in range(STEPS):
            results = []
            # The third time some ranks have a record and the others do not.
            mixed = graphs if (endpoint.rank + step) % 2 else launching
            for offset, forward in enumerate((evaluate, graphs, mixed)):
                adapter.evaluate_by(forward)
                number = first + PASSES * (idx * STEPS + step) + offset
                before = recorder.num_replays
                results.append(
                    one_step(endpoint, adapter, spec, prompt, condition, latents, step, layout, number)
                )
                num_replays += recorder.num_replays - before if offset == 1 else 0
            num_steps += 1
            for result in results[1:]:
                pairs = [(results[0].tensors[name], tensor) for name, tensor in result.tensors.items()]
                num_different += sum(not torch.equal(*pair) for pair in pairs)
            latents = results[1]
    return {
        "different": num_different,
        "replays": num_replays,
        "steps": num_steps,
        "records": len(graphs._records),
    }


@torch.no_grad()
def record_new_texts(
    endpoint: CudaEndpoint, layouts: Sequence[Layout], first: int, in_batch: bool, is_padded: bool
) -> dict[str, Any]:
    """Steps with prompts of lengths that no step had before, recorded in their turn: as `compare`.

    is_padded: where they can be, so that some need no record of their own.
    """
    with (
        recording_always(),
        patch.object(guidance, "is_batch_faster", return_value=in_batch),
        patch.object(texts, "is_fast", is_fast if is_padded else lambda *_: False),
    ):
        return _record_new_texts(endpoint, layouts, first, is_padded)


def _record_new_texts(
    endpoint: CudaEndpoint, layouts: Sequence[Layout], first: int, is_padded: bool
) -> dict[str, Any]:
    device = use_own_stream(endpoint)
    model = "tiny-qwen-image"
    adapter: Any = load_adapter(find_configs(model), device=str(device), has_random_weights=True)
    recorder = CountingRecorder(device)
    graphs = Graphs(recorder, device)
    num_different = num_steps = 0
    evaluations: list[bool] = []
    """Whether each was captured."""

    def noted(transformer: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        evaluations.append(torch.cuda.is_current_stream_capturing())
        return evaluate(transformer, inputs)

    numbers = iter(range(first, first + 2 * len(TEXTS) * len(layouts)))
    recorded_slots: set[tuple[int, int]] = set()
    """Degree and slot of layouts before; their records serve all ranks."""
    for layout in layouts:
        own = [next(numbers) for _ in range(2 * len(TEXTS))]
        if endpoint.rank not in layout.ranks:
            continue
        unentered = None if layout.degree == 1 else parallel_from(endpoint.unentered(layout))
        slot = layout.degree, layout.slot_of(endpoint.rank)
        for idx, text in enumerate(TEXTS):
            spec = adapter.geometry.resolve(JobSpec(id="job", prompt=text, seed=1, steps=STEPS, **QWEN))
            prompt = adapter.encode(spec)
            condition, latents = adapter.prepare(spec, prompt)
            adapter.evaluate_by(graphs)
            evaluations.clear()
            with patch.object(graphs_module, "evaluate", noted), graphs.recording(unentered):
                alone = None if unentered is None else rehearsal(unentered)
                adapter.denoise(spec, prompt, condition, latents, step=0, parallel=alone)
            if slot in recorded_slots:
                assert evaluations == []
            elif idx:  # the negative prompt is as it was
                # Padded, a text may need no record, or be the first of which attention counts tokens.
                assert evaluations == [True] or (is_padded and evaluations in ([], [False, True]))
            results = []
            for forward, number in zip((evaluate, graphs), own[2 * idx :], strict=False):
                adapter.evaluate_by(forward)
                torch.cuda.synchronize()
                results.append(
                    one_step(endpoint, adapter, spec, prompt, condition, latents, 0, layout, number)
                )
            num_different += sum(
                not torch.equal(results[0].tensors[name], tensor)
                for name, tensor in results[1].tensors.items()
            )
            num_steps += 1
        recorded_slots.add(slot)
    replays, records = recorder.num_replays, len(graphs._records)
    return {"different": num_different, "replays": replays, "steps": num_steps, "records": records}


def record_after_failures(endpoint: CudaEndpoint) -> None:
    """What a recorder records after one that went wrong, and when all of its records are gone."""
    device = use_own_stream(endpoint)
    recorder = CudaRecorder(device)
    x = torch.ones(8, device=device)

    def invalid(_: Parallel | None) -> torch.Tensor:
        return x * (x + 1).sum().item()  # it waits for the device

    def failing(_: Parallel | None) -> torch.Tensor:
        raise ValueError(str(x + 1))

    def works() -> Any:
        recorded = recorder.record(lambda _: x * 3 + torch.zeros(1 << 20, device=device)[:8], None)
        torch.randn(8, device=device)
        assert torch.equal(recorded(None), torch.full_like(x, 3)), "a replay"
        return recorded

    kept = works()
    for wrong in (invalid, failing, invalid):
        try:
            recorder.record(wrong, None)
        except (RuntimeError, ValueError):
            torch.randn(8, device=device)
        else:
            raise AssertionError("this cannot be recorded")
        works()
        assert torch.equal(kept(None), torch.full_like(x, 3)), "a replay of what was there before"
    del kept
    for _ in range(2):
        works()  # whose record goes at once
        torch.cuda.empty_cache()
        works()


def one_step(
    endpoint: CudaEndpoint,
    adapter: Any,
    spec: JobSpec,
    prompt: Fields,
    condition: Fields,
    latents: Fields,
    step: int,
    layout: Layout,
    number: int,
) -> Fields:
    """Launched without waiting for the device at any point."""
    parallel = None
    if layout.degree > 1:
        group = endpoint.group(Descriptor(number, layout, (1,) * layout.degree))
        group.enter()
        parallel = parallel_from(group)
    if not isinstance(adapter, PipelineAdapter):  # schedulers of diffusers read their first timestep
        torch.cuda.set_sync_debug_mode("error")
    try:
        result: Fields = adapter.denoise(spec, prompt, condition, latents, step=step, parallel=parallel)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    endpoint.check(number)
    return result
