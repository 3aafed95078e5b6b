import threading
from dataclasses import replace

from builders import make_job, simulate, simulated_control

from gfgen.policies.auto import choose_auto
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.core.events import JobArrived, PolicyChanged, RankLost, RankReady
from gfgen.runtime.simulate import choosers
from gfgen.runtime.simulate.choosers import ImmediateChooser, ThreadedChooser
from gfgen.runtime.simulate.rollout import with_foresight
from gfgen.snapshot import Choice

JOBS = [
    make_job(f"job-{n:02d}", steps=2 + n % 5, arrival_s=0.2 * n, deadline_s=3.0, uses_cfg=True)
    for n in range(40)
]


def run(choose, *, jobs=JOBS, policy="auto"):
    control, recorder = simulated_control(
        jobs, policy=policy, num_ranks=4, max_degree=4, chooser=ImmediateChooser(choose)
    )
    control.run()
    return control, recorder


def changes(recorder):
    return [event for event in recorder.events if isinstance(event, PolicyChanged)]


def in_turns(*policies):
    """Chooses these policies one after the other."""
    left = list(policies)
    return lambda snapshot, last: Choice(left.pop(0), "a test") if left else None


def test_a_choice_takes_effect_by_an_event():
    control, recorder = run(in_turns("srtf", "fcfs"))
    assert [event.policy for event in changes(recorder)] == ["srtf", "fcfs"]
    assert control.decider.policy.name == "fcfs"
    assert len(recorder.outcomes) == len(JOBS)


def test_what_is_chosen_already_is_no_event():
    _, recorder = run(in_turns("srtf", "srtf", "srtf"))
    assert len(changes(recorder)) == 1


def test_runs_under_auto_are_the_same_every_time():
    runs = [run(choose_auto)[1] for _ in range(2)]
    assert runs[0].dispatches == runs[1].dispatches
    assert runs[0].events == runs[1].events


def test_the_journals_events_are_all_that_a_run_under_auto_depends_on():
    """Decisions follow from the events alone: nobody has to choose again."""
    _, first = run(in_turns("srtf,degree=2", "triage,degree=4"))
    control, again = simulated_control(JOBS, policy="auto", num_ranks=4, max_degree=4)
    for event in changes(first):
        control.clock.at(event)
    control.run()
    assert [(d.task, d.layout) for d in again.dispatches] == [(d.task, d.layout) for d in first.dispatches]


def test_a_chooser_that_raises_leaves_the_policy_as_it_is(caplog):
    def broken(snapshot, last):
        raise ValueError("no idea")

    control, recorder = run(broken)
    assert control.decider.policy.name == "auto"
    assert len(recorder.outcomes) == len(JOBS)
    assert "choosing a policy failed: ValueError: no idea" in caplog.text


def test_nothing_is_thought_about_while_every_rank_is_gone(caplog):
    """All of them may have died of a model that none could load; auto looks ahead when one is back."""
    asked = []

    def choose(snapshot, last):
        asked.append(len(snapshot.ranks))
        return choose_auto(snapshot, last)

    control, _ = simulated_control(JOBS[:2], policy="auto", num_ranks=1, chooser=ImmediateChooser(choose))
    control.state.apply(RankReady(0.0, 0, 1, 0.0))
    control.record(JobArrived(0.0, "job-00"))
    control.state.apply(RankLost(0.0, 0, 1, "killed"))
    control.reconsider(control.decider.chooser)
    assert asked == []
    control.state.apply(RankReady(1.0, 0, 2, 0.0))
    control.reconsider(control.decider.chooser)
    assert asked == [1]
    assert "choosing a policy failed" not in caplog.text


def test_policies_are_chosen_again_when_another_one_is_asked_for_after_one_was_given_up():
    asked = []
    control, _ = simulated_control(
        JOBS,
        policy="auto",
        num_ranks=4,
        chooser=ImmediateChooser(lambda *_: asked.append(control.decider.policy.name)),
    )
    control.decider.policy = NamedPolicy("broken", lambda snapshot: None)
    control.clock.at(PolicyChanged(JOBS[len(JOBS) // 2].spec.arrival_s, "auto", "asked for over HTTP"))
    control.run()
    assert control.decider.given_up is not None
    assert asked
    assert asked[-1] == "auto"


def test_what_is_no_choice_or_no_policy_leaves_the_policy_as_it_is(caplog):
    left = ["srtf", Choice("srfft", "a typing error"), Choice("srtf,degree=0", "none that can be")]
    control, recorder = run(lambda snapshot, last: left.pop(0) if left else None)
    assert control.decider.policy.name == "auto"
    assert len(recorder.outcomes) == len(JOBS)
    assert "type str; a Choice or None is accepted" in caplog.text
    assert "--policy srfft: unknown" in caplog.text
    assert "degree = 0" in caplog.text


def test_a_thought_that_never_ends_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(choosers, "CLOSE_TIMEOUT_S", 0.01)
    is_let_go = threading.Event()
    chooser = ThreadedChooser(lambda snapshot, last: is_let_go.wait())
    control, _ = simulated_control(JOBS, policy="auto", num_ranks=4, max_degree=4)
    chooser.consider(control.state.snapshot())
    chooser.close()
    is_let_go.set()
    assert "choosing a policy has not ended" in caplog.text


def test_nothing_is_chosen_any_more_after_the_fallback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def policy(snapshot):\n    raise ValueError('broken')\n")
    control, recorder = run(lambda snapshot, last: Choice(str(path), "a bad idea"))
    assert control.decider.policy.name == "fcfs"
    assert changes(recorder)[-1].policy == "fcfs"
    assert len(recorder.outcomes) == len(JOBS)


def test_a_chooser_beside_the_run_thinks_in_a_thread_and_is_asked_again_only_afterwards():
    may_end, asked = threading.Event(), []

    def slow(snapshot, last):
        asked.append(last)
        assert may_end.wait(10)
        return Choice("srtf", "after a while")

    chooser = ThreadedChooser(slow)
    snapshot = simulated_control(JOBS[:1])[0].state.snapshot_of_traffic()
    chooser.consider(snapshot)
    chooser.consider(snapshot)
    assert chooser.take() is None
    may_end.set()
    chooser._thread.join()
    assert chooser.take() == Choice("srtf", "after a while")
    assert chooser.take() is None
    assert asked == [None]
    chooser.consider(snapshot)
    chooser._thread.join()
    assert asked[1] == Choice("srtf", "after a while")
    chooser.close()


def test_a_thought_ends_with_the_run():
    looked = threading.Event()

    def endless(snapshot, last):
        while True:
            snapshot.foresee(load_policy("srtf").decide)
            looked.set()

    chooser = ThreadedChooser(endless)
    control, _ = simulated_control(JOBS, num_ranks=4)
    control.run()
    chooser.consider(with_arrivals(control))
    assert looked.wait(10)
    chooser.close()
    assert chooser.take() is None


def with_arrivals(control):
    """A snapshot from which jobs are expected, so that looks ahead have turns to be broken off in."""
    snapshot = replace(control.state.snapshot_of_traffic(), expects_more=True)
    assert with_foresight(snapshot).foresee(load_policy("srtf").decide).num_jobs > 0
    return snapshot


def test_auto_ends_batches_without_deadlines_too():
    assert len(simulate([make_job(f"job-{n}") for n in range(9)], policy="auto").outcomes) == 9
