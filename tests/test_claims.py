import dataclasses
import json
import multiprocessing
import os
import threading
import time

import pytest

from dmc import claims
from dmc.claims import ClaimedError, claim

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "claim"


def hold(path, ready):
    with claim(path):
        ready.set()
        time.sleep(60)


def elsewhere(path, number=1, age=0.0, **changes):
    """Leave the claim of a process on another machine, last touched `age` seconds ago."""
    holder = dataclasses.replace(claims._myself(), **{"host": "node7", "pid": 4711, "space": "another", **changes})
    file = path.with_name(f"{path.name}.{number}")
    file.write_text(json.dumps(dataclasses.asdict(holder)))
    os.utime(file, (time.time() - age,) * 2)
    return file


def files(path):
    return sorted(each.name for each in path.parent.iterdir())


def test_second_process_is_told_who_holds_the_claim_until_that_one_dies(path):
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(path, ready))
    process.start()
    ready.wait(20)
    before = (path.parent / "claim.1").read_bytes()
    for wait in (False, True):  # it lives: nothing to wait for
        with (
            pytest.raises(ClaimedError, match=rf"held by process {process.pid} on .*, since 20") as refused,
            claim(path, wait),
        ):
            raise AssertionError
        assert refused.value.holder.pid == process.pid
    assert files(path) == ["claim.1"] and (path.parent / "claim.1").read_bytes() == before
    process.kill()  # not joined: it is a zombie
    while claims._started(process.pid):
        time.sleep(0.001)
    with claim(path):
        assert files(path) == ["claim.2"]
    assert files(path) == []
    process.join()


def fail_inside(path):
    with claim(path):
        with pytest.raises(ClaimedError), claim(path):
            raise AssertionError
        raise KeyError


def test_the_same_process_is_refused_while_it_holds_and_free_after_an_error(path):
    with pytest.raises(KeyError):
        fail_inside(path)
    with claim(path):
        assert files(path) == ["claim.1"]


def test_claim_of_another_machine_is_void_when_no_touch_has_come_for_long(path):
    elsewhere(path, age=claims.EXPIRY / 2)
    with pytest.raises(ClaimedError, match="process 4711 on node7"), claim(path):
        raise AssertionError
    elsewhere(path, age=claims.EXPIRY + 1)
    (path.parent / "claim.3").touch()  # a crash before the name was written
    os.utime(path.parent / "claim.3", (0, 0))
    with claim(path):
        assert files(path) == ["claim.4"]


def test_waiting_ends_with_a_sign_of_life_or_when_there_is_none(path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.05)
    file = elsewhere(path)
    timer = threading.Timer(0.1, os.utime, (file, (time.time() + 1,) * 2))
    timer.start()
    with pytest.raises(ClaimedError, match="node7"), claim(path, wait=True):
        raise AssertionError
    monkeypatch.setattr(claims, "EXPIRY", 0.3)
    elsewhere(path)
    with claim(path, wait=True):
        assert files(path) == ["claim.2"]


def test_a_holder_touches_its_claim(path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.01)
    with claim(path):
        (file,) = path.parent.iterdir()
        os.utime(file, (0, 0))
        while file.stat().st_mtime == 0:
            time.sleep(0.001)


def test_a_holder_that_was_taken_for_dead_notices(path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.01)
    with claim(path) as lost:
        (file,) = path.parent.iterdir()
        assert not lost.is_set()
        file.unlink()  # as by who takes over
        assert lost.wait(20)


def test_a_requeued_job_takes_over_from_its_earlier_start_at_once(path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    elsewhere(path, slurm_job="17", slurm_restarts=1)  # another step of this start
    with pytest.raises(ClaimedError, match="Slurm job 17"), claim(path):
        raise AssertionError
    elsewhere(path, slurm_job="17", slurm_restarts=0)
    with claim(path):
        assert files(path) == ["claim.2"]


def test_never_two_hold_a_claim_that_was_void(path):
    holding, most, taken = [], [], []

    def contend():
        for _ in range(40):
            try:
                own = claims._take(path)
            except ClaimedError:
                continue
            holding.append(own)
            most.append(len(holding))
            taken.append(own)
            holding.remove(own)
            if len(taken) % 2:
                elsewhere(path, int(own.name.rpartition(".")[2]), age=claims.EXPIRY + 1)  # dies
            else:
                own.unlink()

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(taken) > 6


def test_who_was_slow_after_its_look_finds_the_others(path, monkeypatch):
    plain = claims._refuse_held
    elsewhere(path, 2, age=claims.EXPIRY + 1)

    def refuse_held(path, found):
        monkeypatch.setattr(claims, "_refuse_held", plain)
        last = plain(path, found)
        with claim(path):  # takes over, removes what was void, ends, and the numbers begin anew
            pass
        elsewhere(path, 1)
        return last

    monkeypatch.setattr(claims, "_refuse_held", refuse_held)
    with pytest.raises(ClaimedError, match="node7"), claim(path):
        raise AssertionError
    assert files(path) == ["claim.1"]


def test_a_holder_that_wakes_up_leaves_a_later_claim_of_its_number_alone(path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.01)
    with claim(path) as lost:
        later = path.with_name("claim.1.later")
        later.write_text("{}")  # by which the file of this number is another one
        later.replace(path.with_name("claim.1"))
        assert lost.wait(10)
    assert files(path) == ["claim.1"]
