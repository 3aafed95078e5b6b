"""Which devices a run uses."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gfgen.errors import InputError
from gfgen.runtime.core import devices
from gfgen.runtime.core.devices import Devices, Gpu, choose_devices, find_gpus, parse_memory, show_only

FOUR = tuple(Gpu("NVIDIA H200", 150_000_000_000 - idx) for idx in range(4))


@pytest.fixture
def machine_with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A machine whose system shows a GPU; the test says what the child process answers."""
    sign = tmp_path / "nvidiactl"
    sign.touch()
    monkeypatch.setattr(devices, "_SIGNS", (str(sign),))
    monkeypatch.setattr(devices, "_is_torch_for_cpus", lambda: False)

    def answers(stdout: str = "", error: Exception | None = None) -> None:
        def run(*_: object, **__: object) -> SimpleNamespace:
            if error:
                raise error
            return SimpleNamespace(stdout=stdout)

        monkeypatch.setattr(subprocess, "run", run)

    return answers


def test_all_gpus_are_used_unless_told_otherwise():
    chosen = choose_devices(find=lambda: FOUR)
    assert (chosen.kind, chosen.num_ranks) == ("cuda", 4)
    assert chosen.memory_bytes == 150_000_000_000 - 3


def test_ranks_limits_the_gpus():
    assert choose_devices(num_ranks=2, find=lambda: FOUR).gpus == FOUR[:2]


def test_a_gpu_without_bf16_is_refused_unless_no_rank_uses_it():
    gpus = (*FOUR[:1], replace(FOUR[1], name="Tesla T4", capability=(7, 5)))
    assert choose_devices(num_ranks=1, find=lambda: gpus).gpus == gpus[:1]
    with pytest.raises(InputError, match=r"Tesla T4: .*8\.0, which is not sm_75; leave such GPUs out with"):
        choose_devices(find=lambda: gpus)


def test_without_gpus_there_are_four_cpu_ranks():
    chosen = choose_devices(find=tuple)
    assert (chosen.kind, chosen.num_ranks, chosen.memory_bytes) == ("cpu", 4, None)
    assert choose_devices(num_ranks=7, find=tuple).num_ranks == 7


def test_memory_can_be_limited_on_gpus_and_on_cpu_ranks():
    assert choose_devices(memory_limit=40, find=lambda: FOUR).memory_bytes == 40
    assert choose_devices(memory_limit=10**12, find=lambda: FOUR).memory_bytes == 150_000_000_000 - 3
    assert choose_devices(memory_limit=40, find=tuple).memory_bytes == 40


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("40GB", 40 * 10**9), ("1.5 g", 1_500_000_000), ("500MB", 5 * 10**8), ("7000000", 7 * 10**6)],
)
def test_sizes_of_memory_are_understood(text: str, num_bytes: int):
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0GB", "40", "1KB", "40 GiB", "much", "-1GB", "1e9"])
def test_what_is_no_size_of_memory_is_refused(text: str):
    with pytest.raises(InputError, match="a size like 40GB or 500MB is accepted"):
        parse_memory(text)


def test_cpu_ranks_can_be_forced_and_nobody_looks_for_gpus():
    def find() -> tuple[Gpu, ...]:
        raise AssertionError("nobody should look")

    assert choose_devices("cpu", find=find).kind == "cpu"


def test_gpus_that_are_not_there_are_refused():
    with pytest.raises(InputError, match="no usable GPU"):
        choose_devices("cuda", find=tuple)
    with pytest.raises(InputError, match="--ranks 5: there are 4 GPUs"):
        choose_devices(num_ranks=5, find=lambda: FOUR)


def test_a_machine_without_signs_of_a_gpu_starts_no_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "_SIGNS", ())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert find_gpus() == ()


def test_a_driver_is_asked_without_signs_if_gpus_are_asked_for(machine_with_gpus, monkeypatch):
    monkeypatch.setattr(devices, "_SIGNS", ())
    machine_with_gpus('[["a GPU", 80, [], [9, 0]]]')
    assert find_gpus() == ()
    assert [gpu.name for gpu in find_gpus(must_ask=True)] == ["a GPU"]


def test_numbers_of_gpus_count_among_those_that_are_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(InputError, match="shows 2 GPUs, from 0"):
        show_only("2")
    show_only("1")
    assert devices.os.environ["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.mark.parametrize(("transport", "over_host"), [("auto", False), ("host", True)])
def test_cpu_ranks_may_exchange_as_gpus_do_over_main_memory(transport, over_host):
    assert choose_devices(find=tuple, transport=transport).over_host is over_host


def test_gpus_are_those_that_the_child_process_names(machine_with_gpus):
    machine_with_gpus('[["NVIDIA H200", 150, [1], [9, 0]], ["NVIDIA H200", 151, [], [9, 0]]]')
    assert find_gpus() == (
        Gpu("NVIDIA H200", 150, frozenset({1}), (9, 0)),
        Gpu("NVIDIA H200", 151, frozenset(), (9, 0)),
    )


def test_a_driver_that_fails_means_no_gpus_and_a_warning(machine_with_gpus, caplog):
    machine_with_gpus(error=subprocess.CalledProcessError(1, "probe", stderr="CUDA: cuInit failed\n"))
    assert find_gpus() == ()
    assert "CUDA: cuInit failed" in caplog.text


def test_a_torch_for_cpus_means_no_gpus_and_a_warning(machine_with_gpus, monkeypatch, caplog):
    machine_with_gpus('[["NVIDIA H200", 150, [], [9, 0]]]')
    monkeypatch.setattr(devices, "_is_torch_for_cpus", lambda: True)
    assert find_gpus() == ()
    assert "built for CPUs only" in caplog.text


def test_the_probe_lists_names_memory_and_who_reaches_whom(monkeypatch: pytest.MonkeyPatch):
    from gfgen.gfc.cuda import driver

    names = SimpleNamespace(
        num_devices=2,
        name=lambda idx: f"GPU {idx}",
        memory_bytes=lambda idx: 7 + idx,
        can_access=lambda device, peer: device < peer,
        attribute=lambda idx, number: {driver.MAJOR: 8, driver.MINOR: 9}[number],
    )
    monkeypatch.setattr(driver, "driver", lambda: names)
    assert driver.probe() == '[["GPU 0", 7, [1], [8, 9]], ["GPU 1", 8, [], [8, 9]]]'


def test_ranks_may_share_gpus_and_their_memory():
    chosen = choose_devices(ranks_per_gpu=2, find=lambda: FOUR)
    assert (chosen.num_ranks, chosen.gpus) == (8, FOUR)
    assert chosen.memory_bytes == chosen.rank_limit == (150_000_000_000 - 3) // 2
    assert choose_devices(num_ranks=3, ranks_per_gpu=2, find=lambda: FOUR).gpus == FOUR[:2]
    assert choose_devices(memory_limit=40, ranks_per_gpu=4, num_ranks=2, find=lambda: FOUR).rank_limit == 10
    assert choose_devices(memory_limit=40, find=lambda: FOUR).rank_limit == 40
    assert choose_devices(find=lambda: FOUR).rank_limit is None


def test_there_are_as_many_ranks_at_most_as_their_gpus_take_and_as_a_layout_may_have():
    assert choose_devices(ranks_per_gpu=8, find=lambda: FOUR).num_ranks == 8
    with pytest.raises(InputError, match="--ranks 3: there are 1 GPUs with 2 ranks each; 2 at most"):
        choose_devices(num_ranks=3, ranks_per_gpu=2, find=lambda: FOUR[:1])


def test_that_ranks_share_gpus_is_one_line_and_has_no_effect_on_cpu_ranks(caplog):
    caplog.set_level("INFO")
    choose_devices(ranks_per_gpu=2, find=lambda: FOUR)
    assert choose_devices(ranks_per_gpu=2, transport="host", find=tuple).ranks_per_gpu == 1
    choose_devices(transport="host", link="1GB/s", find=tuple)
    assert [record.getMessage() for record in caplog.records] == [
        "2 ranks share each GPU and take turns: slower than one rank per GPU",
        "--ranks-per-gpu has no effect on CPU ranks",
        "--transport host has no effect on CPU ranks",
    ]


def reaching(*peers: set[int]) -> Devices:
    gpus = tuple(Gpu("a GPU", 100, frozenset(reached)) for reached in peers)
    return choose_devices(find=lambda: gpus)


def test_gpus_that_reach_each_other_are_one_island():
    assert reaching({1, 2}, {0, 2}, {0, 1}).islands == ((0, 1, 2),)
    assert choose_devices(find=lambda: FOUR).islands == ((0, 1, 2, 3),)
    assert choose_devices(num_ranks=3, find=tuple).islands == ((0, 1, 2),)


def test_gpus_that_do_not_reach_each_other_are_apart():
    assert reaching({2}, {3}, {0}, {1}).near == ((0, 2), (1, 3))
    assert reaching({1, 2}, {0}, {0}).near == ((0, 1), (2,))  # not all of three reach each other


@pytest.mark.parametrize(
    ("peers", "islands"),
    [
        (({1}, {0}, set()), ((0, 1), (2,))),
        (({1, 2}, {0, 2}, {0, 1}, set()), ((0, 1, 2), (3,))),
        (({1}, {0}, {3}, {2}, set()), ((0, 1, 2, 3), (4,))),
    ],
)
def test_gpus_in_sets_of_another_size_share_no_step_and_pin_no_memory_for_it(peers, islands):
    devices = reaching(*peers)
    assert devices.islands == islands
    assert devices.over_host is (len(islands[0]) == 4)


def test_pairs_share_steps_over_main_memory_unless_only_peer_memory_may_be_used():
    pairs = [Gpu("a GPU", 10**11, frozenset({each ^ 1})) for each in range(4)]
    found = {each: choose_devices(find=lambda: pairs, transport=each) for each in ("auto", "host", "peer")}
    assert {each: (x.over_host, len(x.islands), len(x.near)) for each, x in found.items()} == {
        "auto": (True, 1, 2),
        "host": (True, 1, 4),
        "peer": (False, 2, 2),
    }


def test_ranks_that_share_a_gpu_reach_each_other():
    apart = tuple(Gpu("a GPU", 100, frozenset()) for _ in range(2))
    options = {"ranks_per_gpu": 2, "find": lambda: apart, "num_ranks": 4}
    assert choose_devices(transport="peer", **options).islands == ((0, 2), (1, 3))
    assert choose_devices(**options).islands == ((0, 2, 1, 3),)
    assert choose_devices(**options).near == ((0, 2), (1, 3))
    alone = choose_devices(ranks_per_gpu=4, find=lambda: apart[:1])
    assert alone.islands == ((0, 1, 2, 3),)
    assert not alone.over_host


@pytest.mark.parametrize("transport", ["auto", "host"])
def test_gpus_without_peer_access_share_steps_over_main_memory(transport):
    apart = [Gpu("a GPU", 10**11, frozenset()) for _ in range(3)]
    over_host = choose_devices(find=lambda: apart, transport=transport)
    assert over_host.over_host
    assert over_host.islands == ((0, 1, 2),)
    assert not choose_devices(num_ranks=1, find=lambda: apart).over_host
    assert choose_devices(find=lambda: apart, transport="peer").islands == ((0,), (1,), (2,))
    assert choose_devices("cpu", transport="peer").islands == ((0, 1, 2, 3),)


def test_a_link_is_a_rate_and_has_an_effect_over_main_memory_only(caplog):
    apart = [Gpu("a GPU", 10**11, frozenset()) for _ in range(2)]
    assert choose_devices(find=lambda: apart, link="12GB/s").link_bytes_per_s == 12e9
    assert choose_devices(find=tuple, link="0.5 GB/s", transport="host").link_bytes_per_s == 5e8
    assert not caplog.records
    choose_devices(find=lambda: FOUR, link="12GB/s")
    assert [each.getMessage() for each in caplog.records] == [
        "--link limits exchanges through main memory only (docs/install.md)"
    ]
    with pytest.raises(InputError, match="--link 'fast'"):
        choose_devices(find=tuple, link="fast")
