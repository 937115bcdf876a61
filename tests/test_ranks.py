"""What the processes of one run tell each other without a collective."""

import threading

import pytest
import torch.distributed as dist

from dmc.ranks import Ranks, is_first_of_node, is_rank_zero

LAUNCHERS = ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")


@pytest.mark.parametrize(
    ("variables", "is_first", "is_nodes_first"),
    [
        ({}, True, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False, True),
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}, True, True),  # torchrun inside srun
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True, True),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, False, False),
        ({"SLURM_PROCID": "8", "SLURM_LOCALID": "0"}, False, True),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, False, True),
        ({"LOCAL_RANK": "1"}, False, False),
    ],
)
def test_one_process_of_each_launcher_is_the_first_of_all_and_one_of_each_node(
    variables, is_first, is_nodes_first, monkeypatch
):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (is_rank_zero(), is_first_of_node()) == (is_first, is_nodes_first)


def act_and_wait(act):
    """Let two ranks meet, rank 1 first; return what happened in its order."""
    store, events = dist.HashStore(), []

    def wait(rank):
        try:
            Ranks(rank, 2).run_on_first("export", lambda: act(events), store)
            events.append(f"{rank} goes on")
        except (OSError, RuntimeError, ValueError) as error:
            events.append(f"{rank} {type(error).__name__}: {error}")

    second = threading.Thread(target=wait, args=(1,))
    second.start()
    wait(0)
    second.join()
    return events


def test_others_wait_until_the_first_rank_is_done():
    events = act_and_wait(lambda events: events.append("written"))
    assert events[0] == "written" and sorted(events[1:]) == ["0 goes on", "1 goes on"]


@pytest.mark.parametrize(
    ("error", "others"),
    [(OSError, "OSError"), (ValueError, "OSError"), (NotImplementedError, "OSError"), (RuntimeError, "RuntimeError")],
)
def test_what_fails_on_the_first_rank_ends_all_with_an_error_of_its_kind(error, others):
    def fail(_):
        raise error("no space left on device")

    said = f"{error.__name__}: no space left on device"
    expected = [f"0 {said}", f"1 {others}: export failed on the first rank: {said}"]
    assert sorted(act_and_wait(fail)) == expected


class Pair(Ranks):
    """A rank whose twin has gathered something before."""

    told = None

    def all_gather_object(self, value):
        return [value, self.told]


def test_every_rank_has_its_own_result():
    assert Pair(0, 2).run_on_all(lambda: 7) == Pair(0, 2).run_on_all(lambda: 7, OSError) == 7


@pytest.mark.parametrize(("kind", "told"), [(None, KeyError("no space")), (OSError, "no space")])
def test_what_fails_on_another_rank_fails_here(kind, told):
    ranks = Pair(0, 2)
    object.__setattr__(ranks, "told", told)
    with pytest.raises(kind or KeyError, match="no space"):
        ranks.run_on_all(lambda: 7, kind)


@pytest.mark.parametrize(("kind", "message"), [(None, "first\nsecond"), (OSError, "first")])
def test_the_first_rank_that_fails_is_the_one_that_all_tell_of(kind, message):
    def fail():
        raise ValueError("first\nsecond")

    for ranks in (Pair(0, 2), Ranks()):
        with pytest.raises(kind or ValueError) as caught:
            ranks.run_on_all(fail, kind)
        assert str(caught.value) == message
        assert kind is None or isinstance(caught.value.__cause__, ValueError)


def test_a_process_alone_acts():
    with pytest.raises(ZeroDivisionError):
        Ranks.world().run_on_first("export", lambda: print(1 // 0))


@pytest.mark.parametrize(("backend", "made"), [("nccl", True), ("gloo", False)])
def test_a_process_alone_gets_a_cpu_group_where_its_only_one_is_nccls(backend, made, monkeypatch):
    """torch's checkpoints in the background ask for it: DeepSpeed on one GPU."""
    for name, found in {"is_initialized": True, "get_rank": 0, "get_world_size": 1, "get_backend": backend}.items():
        monkeypatch.setattr(dist, name, lambda *_, found=found: found)
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: f"{backend}'s group")
    assert Ranks.new_gloo_group().group == ("gloo's group" if made else None)
