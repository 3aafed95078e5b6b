"""Plans and simulated runs as text: the answer first, then late and failed jobs, then the alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from gfgen.runtime.core.metrics import ALL_TAGS, Summary
from gfgen.runtime.predict.cost import uncertain
from gfgen.runtime.simulate.planner import Plan, PlanOption
from gfgen.system.wording import in_words, named

NONE = "-"
MAX_LINES = 5
"""Jobs with a line each, and further jobs named in one line."""
BAR_CHARS = 30
ESTIMATED = "~ Estimated, without moves between ranks; the rest is simulated."
_DAY_S = 86400.0
_SHORT_S = 600.0


def in_plain_words(plan: Plan, *, device: str) -> list[str]:
    lines = [answer(plan), *_late_lines(plan), *_failed_lines(plan)]
    if len(plan.by_policy) > 1:
        title = f"Policies on {plan.counted(plan.best.num_ranks)}"
        lines += ["", *_chart(plan, plan.by_policy, [option.policy for option in plan.by_policy], title)]
    if len(plan.by_ranks) > 1:
        names = [f"{plan.number(option.num_ranks)}  {option.policy}" for option in plan.by_ranks]
        title = f"{plan.unit.capitalize()}s"
        lines += ["", *_chart(plan, plan.by_ranks, names, title), _enough(plan)]
    elif plan.ranks_per_node is not None:
        lines += ["", _enough(plan)]
    if any(option.is_estimated for option in (*plan.by_policy, *plan.by_ranks)):
        lines += ["", ESTIMATED]
    lines += ["", f"Predicted with {device}."]
    if doubts := uncertain(plan.doubts, has_writes=plan.has_writes):
        lines.append(f"Uncertain: {doubts}.")
    lines += [f"Left out: {reason}" for reason in plan.refused]
    return lines


def answer(plan: Plan) -> str:
    """The first line: machine, policy, end, and whether everything is in time."""
    best, by_s = plan.best, plan.window.by_s
    done = sum(end_s <= (math.inf if by_s is None else by_s) for end_s in best.ends_s)
    text = f"With {best.policy} on {plan.counted(best.num_ranks)} "
    if plan.machine:
        text = f"On {plan.machine}: with {best.policy} "
    if done == plan.num_jobs:
        text += "the job is" if plan.num_jobs == 1 else f"all {plan.num_jobs} jobs are"
        text += f" done by {clock_time(plan, best.end_s)}"
        text += f", in {in_words(best.end_s)}" if by_s is None else ""
        text += "" if by_s is None else f", {in_words(by_s - best.end_s)} before {clock_time(plan, by_s)}"
    else:
        text += f"{done} of {plan.num_jobs} jobs are done"
        if by_s is not None:
            text += f" by {clock_time(plan, by_s)}; the last one ends at {clock_time(plan, best.end_s)}"
            text += f", {in_words(best.end_s - by_s)} later" if best.end_s > by_s else ""
    if not best.num_deadlines:
        return f"{text}."
    if not best.num_deadlines_missed:
        met = "its deadline is" if best.num_deadlines == 1 else f"all {best.num_deadlines} deadlines are"
        return f"{text}; {met} met."
    missed = f"{best.num_deadlines_missed} of {best.num_deadlines} deadlines"
    return f"{text}; {missed} {'is' if best.num_deadlines_missed == 1 else 'are'} missed."


def clock_time(plan: Plan, seconds: float) -> str:
    """'03:12' in local time, with the weekday or the date if it is more than a day away."""
    form = "%H:%M:%S" if max(plan.best.end_s, 60.0) < _SHORT_S else "%H:%M"
    if abs(seconds) >= _DAY_S:
        form = f"%a {form}" if 0 < seconds < 6 * _DAY_S else f"%Y-%m-%d {form}"
    return datetime.fromtimestamp(plan.window.started_at + seconds).strftime(form)


def missed(option: PlanOption) -> str:
    """'2 late, 1 fails'; empty if nothing is missed."""
    late = [f"{len(option.late)} late"] if option.late else []
    number = len(option.failed)
    return ", ".join([*late, *([f"{number} fail{'s' if number == 1 else ''}"] if number else [])])


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs. Times are seconds since `started_at`, which is Unix time."""
    fewest = plan.fewest
    return {
        "answer": answer(plan),
        "machine": plan.machine,
        "started_at": plan.window.started_at,
        "by_s": plan.window.by_s,
        "num_jobs": plan.num_jobs,
        "best": _option_as_json(plan.best),
        "policies": [_option_as_json(option) for option in plan.by_policy],
        "ranks": [_option_as_json(option) for option in plan.by_ranks],
        "fewest_ranks": None if fewest is None else fewest.num_ranks,
        "ranks_per_node": plan.ranks_per_node,
        "doubts": uncertain(plan.doubts, has_writes=plan.has_writes),
        "refused": list(plan.refused),
    }


def _option_as_json(option: PlanOption) -> dict[str, Any]:
    return {
        "policy": option.policy,
        "num_ranks": option.num_ranks,
        "is_estimated": option.is_estimated,
        "end_s": option.end_s,
        "mean_latency_s": None if math.isinf(option.mean_latency_s) else option.mean_latency_s,
        "deadlines": option.num_deadlines,
        "deadlines_missed": option.num_deadlines_missed,
        "late": [{"job": job.job_id, "due_s": job.due_s, "ended_s": job.ended_s} for job in option.late],
        "failed": [{"job": job.job_id, "ended_s": job.ended_s, "error": job.error} for job in option.failed],
    }


def _late_lines(plan: Plan) -> Iterator[str]:
    late = plan.best.late
    if late:
        head = "One job is late" if len(late) == 1 else f"{len(late)} jobs are late, the latest first"
        yield from ("", f"{head}:")
    for job in late[:MAX_LINES]:
        due, ended = clock_time(plan, job.due_s), clock_time(plan, job.ended_s)
        yield f"  {job.job_id}: due {due}, done {ended}, {in_words(job.late_s)} late"
    if others := late[MAX_LINES:]:
        least, most = in_words(others[-1].late_s), in_words(others[0].late_s)
        margin = most if least == most else f"{least} to {most}"
        yield f"  and {len(others)} more, {margin} late: {named([job.job_id for job in others], 'job')}"


def _failed_lines(plan: Plan) -> Iterator[str]:
    failed = plan.best.failed
    if failed:
        yield from ("", "One job fails:" if len(failed) == 1 else f"{len(failed)} jobs fail:")
    for job in failed[:MAX_LINES]:
        yield f"  {job.job_id}: at {clock_time(plan, job.ended_s)}, {job.error}"
    if others := failed[MAX_LINES:]:
        yield f"  and {len(others)} more: {named([job.job_id for job in others], 'job')}"


def _chart(plan: Plan, options: Sequence[PlanOption], names: Sequence[str], title: str) -> list[str]:
    """A bar per option, in proportion to its duration, with `|` at the time of `--by`."""
    longest_s, by_s = max([option.end_s for option in options]), plan.window.by_s or 0.0
    scale_s = max(longest_s, by_s) if by_s < 3 * longest_s else longest_s
    ends = [("~" if option.is_estimated else "") + clock_time(plan, option.end_s) for option in options]
    if any(option.is_estimated for option in options):
        ends = [end.rjust(max(map(len, ends))) for end in ends]
    name_width, end_width = max(map(len, [title, *names])), max(map(len, [*ends, "done by"]))
    lines = [f"{title:<{name_width}}  done by"]
    for option, name, end in zip(options, names, ends, strict=True):
        length = max(1, round(BAR_CHARS * option.end_s / scale_s)) if scale_s > 0 else 1
        bar = ("#" * length).ljust(BAR_CHARS + 1)
        if 0 < by_s <= scale_s:
            mark = round(BAR_CHARS * by_s / scale_s)
            bar = f"{bar[:mark]}|{bar[mark + 1 :]}"
        lines.append(f"{name:<{name_width}}  {end:<{end_width}}  {bar}  {missed(option) or 'nothing late'}")
    return lines


def _enough(plan: Plan) -> str:
    fewest, most = plan.fewest, plan.by_ranks[-1]
    if fewest is None:
        units = f"{plan.unit}s up to {plan.number(most.num_ranks)}"
        return f"No number of {units} meets everything: on {plan.counted(most.num_ranks)}, {missed(most)}."
    is_one = plan.number(fewest.num_ranks) == 1
    enough = f"{plan.counted(fewest.num_ranks)} {'is' if is_one else 'are'} enough"
    about = ", as is estimated" if fewest.is_estimated else ""
    return f"{enough} for everything to be in time, with {fewest.policy}{about}."


def table(runs: Sequence[tuple[str, Summary]]) -> list[str]:
    summaries = [summary for _, summary in runs]
    rows = [("", *(name for name, _ in runs))]
    rows += [(name, *map(cell, summaries)) for name, cell in _ROWS.items()]
    if any(summary.num_failed for summary in summaries):
        rows.append(("jobs failed", *(str(summary.num_failed) for summary in summaries)))
    if any(summary.num_model_changes for summary in summaries):
        rows.append(("model changes", *map(_changes, summaries)))
    tags = sorted({tag for summary in summaries for tag in summary.attained} - {ALL_TAGS})
    for tag in ([ALL_TAGS] if any(summary.deadlines for summary in summaries) else []) + tags:
        name = "deadlines met" if tag == ALL_TAGS else f"  {tag}"
        found = [summary.attained.get(tag) for summary in summaries]
        rows.append((name, *(f"{x.num_met}/{x.num_jobs} {x.fraction:.0%}" if x else NONE for x in found)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(runs) + 1)]
    aligned = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    return [aligned.format(*row).rstrip() for row in rows]


def _changes(summary: Summary) -> str:
    return f"{summary.num_model_changes} in {in_words(summary.load_s)}" if summary.num_model_changes else NONE


def _latency(name: str) -> Callable[[Summary], str]:
    return lambda summary: NONE if summary.latency is None else in_words(getattr(summary.latency, name))


_ROWS: dict[str, Callable[[Summary], str]] = {
    "makespan": lambda summary: in_words(summary.makespan_s),
    "jobs a minute": lambda summary: f"{summary.jobs_per_min:,.2f}",
    "latency, mean": _latency("mean_s"),
    "latency, P50": _latency("p50_s"),
    "latency, P95": _latency("p95_s"),
    "latency, P99": _latency("p99_s"),
    "ranks busy": lambda summary: f"{summary.utilisation:.0%}",
    "moving state": lambda summary: f"{in_words(summary.moved_s)} {summary.moved_share:.1%}",
}
