"""Step every transformer pipeline of diffusers at small size, and compare with its own call bit by bit.

python -m benchmarks.pipelines [--only REGEX] [--json RESULTS] [--table RESULTS]

Each pipeline runs in a process of its own. The call takes 5 steps, guidance, and every file argument that
the pipeline has; its tasks alternate between two pipeline objects.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SEED = 7
TIMEOUT_S = 60
NUMBERS = (
    "num_frames",
    "base_num_frames",
    "segment_frame_length",
    "video_length",
    "sample_audio",
    "image_crf",
)
"""Arguments whose names sound like files."""
REASONS = {
    r"'transforms'|'torchvision'|OmniGenMulti": "needs torchvision",
    "PyAV": "needs PyAV",
    "without a result": "has no small size",
}
MEMORY_BYTES = 12 << 30


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one pipeline."""

    name: str
    kind: str
    """bitwise, different, not stepped, not built"""
    note: str = ""
    num_steps: int = 0
    arguments: tuple[str, ...] = ()
    """Of the files that the call was given."""
    seconds: float = 0.0


def check(name: str) -> Result:
    """Step one pipeline."""
    from benchmarks.small_pipelines import CannotBuildError, small_call, small_pipeline
    from gfgen.models.stepping.program import NotSteppableError
    from gfgen.models.stepping.verify import difference, stepped_call, whole_call

    start_s = time.monotonic()
    try:
        args = small_call(name)
        whole = whole_call(small_pipeline(name), args, seed=SEED)
    except CannotBuildError as error:
        return Result(name, "not built", str(error))
    except Exception as error:
        return Result(name, "not built", _where(error))
    try:
        stepped, num_steps = stepped_call([small_pipeline(name), small_pipeline(name)], args, seed=SEED)
    except NotSteppableError as error:
        return Result(name, "not stepped", str(error))
    except Exception as error:
        return Result(name, "not stepped", _where(error))
    files = tuple(name for name in args if re.search("image|video|mask|audio|frames|controls", name))
    seconds = time.monotonic() - start_s
    if found := difference(stepped, whole):
        return Result(name, "different", found, num_steps, files, seconds)
    return Result(name, "bitwise", "", num_steps, files, seconds)


def _where(error: Exception) -> str:
    """The error and the line of diffusers that raised it."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "diffusers" in x.filename]
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{at}"


def check_apart(name: str) -> Result:
    """Step one pipeline in a child process, which may run out of memory or time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TIMEOUT_S)
        try:
            result = check(name)
        except BaseException as error:
            result = Result(name, "not built", f"{type(error).__name__}: {error}")
        os.write(writer, json.dumps(asdict(result)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        return Result(name, "not built", f"ends without a result within {TIMEOUT_S} s")
    return Result(**json.loads(text))


def main() -> None:
    """Step the pipelines and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--json", type=Path, help="a file to which results are added")
    parser.add_argument("--table", type=Path, help="print results of --json as the table of docs/models.md")
    options = parser.parse_args()
    if options.table:
        results = [Result(**json.loads(line)) for line in options.table.read_text().splitlines()]
        print(table(list({result.name: result for result in results}.values())))
        return
    _quiet()
    from benchmarks.small_pipelines import pipeline_names

    names = [name for name in pipeline_names() if re.search(options.only, name)]
    results = []
    for name in names:
        result = check_apart(name)
        results.append(result)
        print(f"{name}: {result.kind} {result.num_steps or ''} {result.note}"[:300], flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    counts = {
        kind: sum(result.kind == kind for result in results) for kind in sorted({x.kind for x in results})
    }
    print(counts)


def table(results: list[Result]) -> str:
    """Counts, names of those that are equal, and the others with reasons."""
    bitwise = [result for result in results if result.kind == "bitwise"]
    whole = [result for result in results if result.kind in ("not stepped", "different")]
    rest = [result for result in results if result.kind == "not built"]
    lines = [
        f"Of {len(results)} pipelines {len(bitwise)} give the bits of their own call in steps, "
        f"{len(whole)} run as one task, and {len(rest)} could not be tried at small size.",
        "",
        "| pipeline | steps | files that the call was given |",
        "|---|---|---|",
        *(f"| {_short(x)} | {x.num_steps} | {_files(x)} |" for x in bitwise),
        "",
        "| not in steps | why |",
        "|---|---|",
        *(f"| {_short(x)} | {_reason(x)} |" for x in [*whole, *rest]),
    ]
    return "\n".join(lines)


def _short(result: Result) -> str:
    return result.name.removesuffix("Pipeline")


def _files(result: Result) -> str:
    return ", ".join(f"`{name}`" for name in result.arguments if name not in NUMBERS)


def _reason(result: Result) -> str:
    for pattern, reason in REASONS.items():
        if re.search(pattern, result.note):
            return reason
    note = re.sub(r"\S*site-packages/", "", result.note).replace("|", "/")
    return note if result.kind != "not built" else f"the small version does not run on its own: {note}"


def _quiet() -> Any:
    warnings.filterwarnings("ignore")
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(1)
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    main()
