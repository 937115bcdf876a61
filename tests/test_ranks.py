"""What the processes of one run tell each other without a collective."""

import threading

import pytest
import torch.distributed as dist

from dmc.ranks import Ranks


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


def test_a_process_alone_acts():
    with pytest.raises(ZeroDivisionError):
        Ranks.world().run_on_first("export", lambda: print(1 // 0))
