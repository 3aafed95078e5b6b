"""Step every transformer pipeline of diffusers at small size, and compare with its own call bit by bit.

python -m benchmarks.pipelines [--only REGEX] [--json RESULTS]
python -m benchmarks.pipelines --publish RESULTS

Each pipeline runs in a process of its own. The call takes 5 steps, guidance, and every file argument that
the pipeline has; its tasks alternate between two pipeline objects. --publish writes the results to
gfgen/models/families/pipelines.json and to the table in docs/pipelines.md.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gfgen.errors import WorkerError, in_one_line
from gfgen.system.wording import table_head, table_row

REGISTRY = Path(__file__).parents[1] / "gfgen/models/families/pipelines.json"
DOCS = Path(__file__).parents[1] / "docs/pipelines.md"
BEGIN, END = "<!-- python -m benchmarks.pipelines --publish writes this -->", "<!-- end -->"
SEED = 7
TIMEOUT_S = 60
KINDS = ("bitwise", "different", "not stepped", "not built")
"""What may come of a pipeline; with several calls, the last one of these counts."""
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
    """One of `KINDS`."""
    note: str = ""
    num_steps: int = 0
    arguments: tuple[str, ...] = ()
    """Of the files that the call was given."""
    seconds: float = 0.0


def check(name: str) -> Result:
    """Step one pipeline."""
    from small_pipelines import CannotBuildError, small_calls

    start_s = time.monotonic()
    try:
        calls = small_calls(name)
    except CannotBuildError as error:
        return Result(name, "not built", str(error))
    results = [_check_call(name, args) for args in calls]
    worst = max(results, key=lambda result: KINDS.index(result.kind))
    files = dict.fromkeys(file for result in results for file in result.arguments)
    return replace(worst, arguments=tuple(files), seconds=time.monotonic() - start_s)


def _check_call(name: str, args: Mapping[str, Any]) -> Result:
    """One call in steps, and as a whole."""
    from small_pipelines import CannotBuildError, small_pipeline

    from gfgen.models.geometry.call import signature_of
    from gfgen.models.stepping.check import difference, stepped_call, whole_call
    from gfgen.models.stepping.program import NotSteppableError

    try:
        whole = whole_call(small_pipeline(name), args, seed=SEED)
    except Exception as error:
        reason = str(error) if isinstance(error, CannotBuildError) else _where(error)
        return Result(name, "not built", reason)
    try:
        stepped, num_steps = stepped_call([small_pipeline(name), small_pipeline(name)], args, seed=SEED)
    except Exception as error:
        reason = str(error) if isinstance(error, NotSteppableError) else _where(error)
        return Result(name, "not stepped", re.sub(r"\S*site-packages/", "", reason))
    taken = [*signature_of(name).files, "audio", "controls"]
    files = tuple(file for file in taken if file in args)
    if found := difference(stepped, whole):
        return Result(name, "different", found, num_steps, files)
    return Result(name, "bitwise", "", num_steps, files)


def _where(error: Exception) -> str:
    """The error and the line of diffusers that raised it."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "diffusers" in x.filename]
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{at}"


def in_child(work: Callable[[], Any], timeout_s: int) -> Any:
    """What a function returns in a child process.

    Raises: WorkerError if it raises, or runs out of memory or time.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(timeout_s)
        try:
            found = work()
        except BaseException as error:
            found = WorkerError(in_one_line(error))
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        sent = pipe.read()
    os.waitpid(child, 0)
    found = pickle.loads(sent) if sent else WorkerError(f"ends without a result within {timeout_s} s")
    if isinstance(found, WorkerError):
        raise found
    return found


def verified() -> list[str]:
    """The classes that `gfgen models` lists as running."""
    listed = json.loads(REGISTRY.read_text())
    return [name for name, (how, _) in listed.items() if how in ("in steps", "as one task")]


def main() -> None:
    """Step the pipelines and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--json", type=Path, help="a file to which results are added")
    parser.add_argument("--publish", type=Path, help="write the results of --json to the package and docs")
    options = parser.parse_args()
    if options.publish:
        results = read_results(options.publish)
        REGISTRY.write_text(registry(results))
        start, end = table_in(DOCS.read_text())
        DOCS.write_text(f"{start}{table(results)}{end}")
        return
    quiet()
    from small_pipelines import pipeline_names

    names = [name for name in pipeline_names() if re.search(options.only, name)]
    results = []
    for name in names:
        try:
            result = in_child(partial(check, name), TIMEOUT_S)
        except WorkerError as error:
            result = Result(name, "not built", str(error))
        results.append(result)
        print(f"{name}: {result.kind} {result.num_steps or ''} {result.note}"[:300], flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(result) | {"seconds": round(result.seconds, 1)}) + "\n")
    print(dict(sorted(Counter(result.kind for result in results).items())))


def read_results(path: Path) -> list[Result]:
    """The last result of each pipeline, by name."""
    lines = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    found = {result.name: replace(result, arguments=tuple(result.arguments)) for result in lines}
    return [found[name] for name in sorted(found)]


def registry(results: list[Result]) -> str:
    """The text of pipelines.json: result and output kind of each class."""
    lines = [f" {json.dumps(result.name)}: {json.dumps(_in_registry(result))}" for result in results]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _in_registry(result: Result) -> list[str]:
    from gfgen.models.geometry.call import signature_of
    from gfgen.models.geometry.pipeline import NO_PICTURES, PipelineGeometry

    if NO_PICTURES.search(result.name):
        return ["refused", "protein" if "Protein" in result.name else "sound"]
    words = {"bitwise": "in steps", "not built": "not tried"}
    kind = PipelineGeometry(signature_of(result.name), {}, None).kind
    return [words.get(result.kind, "as one task"), kind]


def table_in(text: str) -> tuple[str, str]:
    """What stands before and behind the table in docs/pipelines.md."""
    start, _, rest = text.partition(BEGIN)
    _, _, end = rest.partition(END)
    return f"{start}{BEGIN}\n", f"\n{END}{end}"


def table(results: list[Result]) -> str:
    """Counts, names of those that are equal, and the others with reasons."""
    bitwise = [result for result in results if result.kind == "bitwise"]
    whole = [result for result in results if result.kind in ("not stepped", "different")]
    rest = [result for result in results if result.kind == "not built"]
    lines = [
        f"Of {len(results)} pipelines {len(bitwise)} give the bits of their own call in steps, "
        f"{len(whole)} run as one task, and {len(rest)} could not be tried at small size.",
        "",
        table_head("pipeline", "steps", "files that the call was given"),
        *(table_row(_short(x), x.num_steps, _files(x)) for x in bitwise),
        "",
        table_head("not in steps", "why"),
        *(table_row(_short(x), _reason(x)) for x in [*whole, *rest]),
    ]
    return "\n".join(lines)


def _short(result: Result) -> str:
    return result.name.removesuffix("Pipeline")


def _files(result: Result) -> str:
    return ", ".join(f"`{name}`" for name in result.arguments)


def _reason(result: Result) -> str:
    for pattern, reason in REASONS.items():
        if re.search(pattern, result.note):
            return reason
    note = result.note.replace("|", "/")
    return note if result.kind != "not built" else f"the small version does not run on its own: {note}"


def quiet() -> None:
    warnings.filterwarnings("ignore")
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(1)
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    main()
