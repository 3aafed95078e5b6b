"""`gfgen serve`: the runtime of `gfgen run` behind HTTP."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import click

from gfgen import log
from gfgen.cli.options import (
    A_MODEL,
    Duration,
    LogOptions,
    NamedPath,
    Option,
    RankOptions,
    batch_option,
    compile_option,
    grace_option,
    log_options,
    lookahead_option,
    max_step_time_option,
    memory_option,
    offload_option,
    policy_option,
    precision_options,
    rank_options,
    ranks_per_gpu_option,
    taken_as,
    trust_code_option,
)
from gfgen.cli.run_files import ClusterOptions, cluster_options, session_of
from gfgen.cli.shown.progress import LineProgress
from gfgen.cluster.ray_cluster import RayCluster
from gfgen.errors import InputError, InterruptedRunError
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import DEFAULT_MODEL
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.devices import parse_memory
from gfgen.runtime.files import resume
from gfgen.runtime.files.live import write_live
from gfgen.runtime.predict.choosers import ThreadedChooser
from gfgen.runtime.predict.job_bounds import JobBounds
from gfgen.server.bridge.run_bridge import RunBridge
from gfgen.server.bridge.supervisor import Supervisor, listen
from gfgen.server.jobs.webhooks import secret_bytes
from gfgen.server.protocol.limits import ApiOptions, ServerLimits, check_key, read_keys
from gfgen.server.protocol.link import Admit, FrontSettings, RunInfo
from gfgen.server.protocol.server_schemas import ServedModel, served_model
from gfgen.session.loras import ServedLora, find_loras
from gfgen.session.session import Arrivals, Session, SessionOptions
from gfgen.system import machine
from gfgen.system.machine import SERVING, check_addresses, check_packages, versions
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

KEY_VARIABLE = "GFGEN_API_KEY"
DEFAULTS = ServerLimits()
DEFAULT_JOB_BOUNDS = JobBounds(pixels=2048 * 2048, frames=257, steps=200)
"""Accept all that the models are made for: Wan2.2 in 1280x720 with 121 frames, Qwen-Image in 2048x2048."""
MAX_STEP_TIME = "10m"
NOT_SERVED = "it is not served any more: start the server with --model NAME too"
"""What to do about a model of an earlier start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(SessionOptions):
    keeps_records: bool = False
    waits_for_space: bool = True
    host: str
    port: int
    front: FrontSettings
    models: tuple[str, ...] = (DEFAULT_MODEL,)
    loras: Mapping[str, ServedLora] = field(default_factory=dict)
    cluster: RayCluster | None = None


class _Size(click.ParamType[int]):
    """Bytes, as 500M or 20G."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_memory(str(value), option="" if param is None else param.opts[0])


class _Pattern(click.ParamType[str]):
    """Text that matches a pattern; a slash at its end is dropped unless it `keeps_slash`."""

    def __init__(self, name: str, pattern: str, *, accepted: str, keeps_slash: bool = False) -> None:
        self.name = name
        self._dropped = "" if keeps_slash else "/"
        self._pattern = pattern
        self._accepted = accepted

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).rstrip(self._dropped)
        if not re.fullmatch(self._pattern, text):
            self.fail(f"{value!r}: {self._accepted} is accepted", param, ctx)
        return text


_SITE = r"https?://[A-Za-z0-9.\-\[\]:]+"

_api_options = taken_as(
    "api",
    ApiOptions,
    click.option(
        "--served-model-name",
        "served_names",
        multiple=True,
        type=_Pattern("alias=model", r"[^=]+=.+", accepted="ALIAS=MODEL"),
        help="Also serve MODEL under the name ALIAS, for example sora-2=wan2.2-ti2v-5b. Repeatable.",
    ),
    click.option(
        "--strict",
        is_flag=True,
        help="Refuse requests with unknown fields, in place of ignoring these fields.",
    ),
    click.option(
        "--root-path",
        "path_prefix",
        type=_Pattern("path", r"(/[A-Za-z0-9._~\-]+)*", accepted="a path like /films"),
        default="",
        help="Path of the server behind a proxy. [the path of --public-url]",
    ),
    click.option(
        "--public-url",
        type=_Pattern("url", _SITE + r"(/[A-Za-z0-9._~\-]+)*", accepted="a URL like https://host/films"),
        help="URL under which clients reach the server. The URLs of results begin with it.",
    ),
    click.option(
        "--allow-origin",
        "allowed_origins",
        multiple=True,
        type=_Pattern("origin", rf"{_SITE}|\*", accepted="an origin like https://example.com, or *,"),
        help="Site whose pages may use the API from a browser. Repeatable.",
    ),
    click.option("--access-log", is_flag=True, help="Log a line for each request."),
    click.option(
        "--webhook",
        "webhook_url",
        type=_Pattern("url", r"https?://[!-~]+", accepted="a URL like https://host/path", keeps_slash=True),
        help="URL to which the server sends each job when it has ended.",
    ),
    click.option(
        "--webhook-host",
        "webhook_hosts",
        multiple=True,
        type=_Pattern("host", r"[a-z0-9.\-\[\]:]+", accepted="HOST or HOST:PORT in small letters"),
        help="Host that a job's own `webhook` may name; HOST alone stands for ports 80 and 443. Repeatable.",
    ),
    click.option(
        "--webhook-secret",
        help="Secret that signs requests to webhooks, whsec_BASE64. Prefer the environment variable "
        "GFGEN_WEBHOOK_SECRET.",
    ),
)


def _most(option: str, field_name: str, default: int | None, help_: str) -> Option:
    return click.option(
        option, field_name, type=click.IntRange(1), default=default, show_default=True, help=help_
    )


_bound_options = taken_as(
    "bounds",
    JobBounds,
    _most("--max-pixels", "pixels", DEFAULT_JOB_BOUNDS.pixels, "Largest width x height of a job."),
    _most("--max-frames", "frames", DEFAULT_JOB_BOUNDS.frames, "Most frames of a job."),
    _most("--max-steps", "steps", DEFAULT_JOB_BOUNDS.steps, "Most steps of a job."),
)
_limit_options = taken_as(
    "limits",
    ServerLimits,
    _most("--max-open", "open_jobs", DEFAULTS.open_jobs, "Most jobs open at once."),
    _most("--max-streams", "streams", DEFAULTS.streams, "Most event streams open at once."),
    click.option(
        "--max-body",
        "body_bytes",
        type=_Size(),
        default="64M",
        show_default=True,
        help="Largest request in bytes.",
    ),
    click.option(
        "--keep",
        "keep_s",
        type=Duration(),
        default="7d",
        show_default=True,
        help="Remove finished jobs after this time.",
    ),
    click.option(
        "--keep-bytes",
        type=_Size(),
        default="100G",
        show_default=True,
        help="Remove the oldest jobs when files exceed this.",
    ),
)


@click.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), default=3000, show_default=True, help="Port to listen on."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--api-key",
    envvar=KEY_VARIABLE,
    help=f"Key that every request must send. Prefer the environment variable {KEY_VARIABLE}. "
    "With --key-file, the key that sees all jobs and may change the policy.",
)
@click.option(
    "--key-file",
    type=NamedPath(),
    help="File of keys, each on a line with a name and the key. Each sees its own jobs.",
)
@click.option(
    "--no-key", is_flag=True, help="Allow requests without a key even if other machines can reach --host."
)
@click.option(
    "--output",
    "-o",
    type=NamedPath(),
    default=Path("outputs/serve"),
    show_default=True,
    help="Folder for results and the job database.",
)
@click.option(
    "--model",
    "models",
    type=A_MODEL,
    multiple=True,
    metavar="NAME",
    help="Model to serve: a name from 'gfgen models', a directory or a hub id. Repeatable. "
    f"[{DEFAULT_MODEL}]",
)
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="NAME=PATH",
    type=_Pattern("lora", r"[A-Za-z0-9._-]{1,64}=.+", accepted="NAME=PATH"),
    help="LoRA that requests can name: a file, a folder or a hub id. Repeatable.",
)
@_api_options
@rank_options(
    ranks_per_gpu_option, memory_option, offload_option, trust_code_option, compile_option, *precision_options
)
@cluster_options
@policy_option
@lookahead_option
@batch_option
@grace_option
@max_step_time_option(MAX_STEP_TIME)
@_bound_options
@_limit_options
@click.option(
    "--umask",
    type=_Pattern("mode", r"0?[0-7]{3}", accepted="three octal digits like 027"),
    default="077",
    show_default=True,
    help="Permissions that new files do not have.",
)
@log_options
def serve(
    *,
    port: int,
    host: str,
    api_key: str | None,
    key_file: Path | None,
    no_key: bool,
    output: Path,
    models: tuple[str, ...],
    loras: tuple[str, ...],
    api: ApiOptions,
    ranks: RankOptions,
    cluster: ClusterOptions,
    policy: str,
    lookahead: float,
    batch: int,
    grace: float,
    max_step_time: float,
    bounds: JobBounds,
    limits: ServerLimits,
    umask: str,
    logs: LogOptions,
) -> int:
    """Generate pictures and videos over HTTP: OpenAI's image and video API, and a web page.

    SIGTERM stops the server within --grace. After a restart it continues every accepted job.
    """
    click.get_current_context().call_on_close(partial(os.umask, os.umask(int(umask, 8))))
    logs.configure(file=logs.log_file)
    if api_key is not None:
        check_key(api_key, where="--api-key")
    keys = {} if key_file is None else read_keys(key_file)
    if api_key in keys.values():
        raise InputError(f"--api-key: it is also in {key_file}; give the admin a key of its own")
    _check_exposure(host, has_key=bool(api_key or keys), no_key=no_key)
    for alias, name in api.aliases.items():
        if name not in (models or (DEFAULT_MODEL,)):
            raise InputError(f"--served-model-name {alias}={name}: {name} is not served; add --model {name}")
    _check_webhooks(api)
    cluster.check({"--gpus": ranks.gpus is not None, "--batch": batch > 1, "--lora": bool(loras)})
    check_packages(SERVING)
    model = (models or (DEFAULT_MODEL,))[0]
    found = click.get_current_context().with_resource(
        cluster.connected(
            ranks=ranks, policy=policy, model=model, lookahead_s=lookahead / 1000, output_dir=output
        )
    )
    options = ServeOptions(
        output_dir=output,
        cluster=found,
        ranks=ranks.found() if found is None else found.ranks,
        policy=load_policy(policy),
        lookahead_s=lookahead / 1000,
        batch=batch,
        grace_s=grace,
        host=host,
        port=port,
        front=FrontSettings(
            output_dir=output.absolute(),
            api_key=api_key,
            keys=keys,
            limits=limits,
            version=versions().get("gfgen", "unknown"),
            api=api,
            log_level=logs.level,
            log_json=logs.log_json,
            log_file=None if logs.log_file is None else logs.log_file.absolute(),
        ),
        job_bounds=replace(bounds, step_s=max_step_time),
        model=model,
        models=models or (DEFAULT_MODEL,),
        loras=find_loras(loras),
    )
    serve_models(options)
    return 0


def serve_models(options: ServeOptions) -> None:
    """Serve until a signal comes.

    Raises: InputError when the address or a model is unavailable; LockedError when another run holds
            the output folder; InterruptedRunError when a second signal did not let steps end.
    """
    machine.allow_most()
    check_addresses()
    with contextlib.ExitStack() as stack:
        listener = listen(options.host, options.port)
        stack.callback(listener.close)
        cluster = options.cluster
        session = stack.enter_context(session_of(options, cluster))
        _ = session.signals  # caught from here on, so that the HTTP process is always stopped
        chooser = stack.enter_context(contextlib.closing(ThreadedChooser(options.policy.choose)))
        bridge = RunBridge(on_policy=lambda policy: chooser.follow(load_policy(policy).choose))
        supervisor = Supervisor(listener, options.front, bridge)
        supervisor.start()
        stack.callback(supervisor.stop)
        with contextlib.suppress(OSError):  # then gfgen status needs the URL
            write_live(options.output_dir, {"url": url_of(options.host, options.port)})
        logger.info("listening on http://%s:%d; loading the models", options.host, options.port)
        found = [session.admission.models.find(name) for name in options.models]
        checkpoints = [model.checkpoint for model in found]
        session.admission.models.tell_of_unused_precision(checkpoints)
        session.admission.memory.serve_loras(options.loras, checkpoints)
        try:
            session.load([], models=options.models)
            loaded = replace(
                session.admission.of_loaded(session.checkpoints, help_=NOT_SERVED), served_loras=options.loras
            )
            session.warm_up(usual_jobs(options.models, loaded))
        except InterruptedRunError:
            text = "stopped while the models were loading; open jobs continue at the next start"
            logger.info("%s", text, extra=log.fields(event="server_stopped"))
            return
        models = [served_model(model, created=int(time.time())) for model in found]
        serve_on(session, bridge, chooser, models, admit=loaded, admit_again=loaded.again)


def usual_jobs(models: Sequence[str], admit: Admit) -> Sequence[AdmittedJob]:
    specs = [
        JobSpec(id=f"usual-{number}", prompt="as usual", model=name) for number, name in enumerate(models)
    ]
    admitted, _ = admit(specs)
    return admitted


def serve_on(
    session: Session,
    bridge: RunBridge,
    chooser: ThreadedChooser,
    models: Sequence[ServedModel],
    *,
    admit: Admit,
    admit_again: Admit,
) -> None:
    """Run the control loop on ready ranks, first with the jobs of the store, until the stop.

    `admit_again` is for jobs that were admitted before.
    """
    options, clock = session.options, Clock()
    device = options.ranks.gpu_name or options.ranks.devices.kind
    info = RunInfo(
        admit=admit,
        admit_again=admit_again,
        models=tuple(models),
        device=device,
        num_ranks=session.num_own_ranks,
        policy=options.policy.name,
        started_at=clock.started_at,
    )
    todo = bridge.open(info, is_stopped=lambda: _has_signal(session.signals))
    if todo is None:
        text = "stopped before it began; open jobs continue at the next start"
        logger.info("%s", text, extra=log.fields(event="server_stopped"))
        return
    resume.forget_others(options.output_dir, {job.job_id for job in todo})
    if session.residency is not None:
        session.residency.note(todo)
    num_ranks = session.num_own_ranks
    ranks = counted(num_ranks, "rank") if num_ranks else "the ranks of nodes"
    logger.info("ready: %s (%s), policy %s", ranks, device, options.policy.name)
    arrivals = Arrivals(bridge, observers=[bridge], requests=bridge, chooser=chooser, on_turn=bridge.turned)
    with contextlib.closing(bridge):
        summary = session.run(todo, observers=[LineProgress()], arrivals=arrivals, clock=clock)
    num_open = summary.num_unfinished
    some = "1 job is open and continues" if num_open == 1 else f"{num_open} jobs are open and continue"
    text = f"{some} at the next start" if num_open else "no job is open"
    logger.info("stopped; %s", text, extra=log.fields(event="server_stopped", open=num_open))


def _check_exposure(host: str, *, has_key: bool, no_key: bool) -> None:
    if not (_is_loopback(host) or has_key or no_key):
        raise InputError(
            f"--host {host}: other machines can reach this address; give --api-key (or {KEY_VARIABLE}), "
            "or --no-key to allow requests without a key"
        )


def _check_webhooks(api: ApiOptions) -> None:
    is_good = api.webhook_secret is not None and secret_bytes(api.webhook_secret) is not None
    if (api.webhook_url or api.webhook_hosts or api.webhook_secret) and not is_good:
        raise InputError(
            "--webhook-secret: webhooks need a secret of whsec_ and 24 to 64 bytes in base64; "
            "'echo whsec_$(openssl rand -base64 32)' makes a good one, for GFGEN_WEBHOOK_SECRET"
        )


def url_of(host: str, port: int) -> str:
    """Where this machine reaches a server that listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has_signal(signals: SignalPipe) -> bool:
    try:
        return bool(signals.take())
    except BlockingIOError:
        return False
