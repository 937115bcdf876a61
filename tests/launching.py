"""Several processes, as torchrun would start them, but forked from one that has imported everything."""

import collections
import csv
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from cpu_deepspeed import allow_cpu

from dmc.results.provenance import git_commit, installed_packages

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed asks when it is imported
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "dmc.training.run",
        "dmc.training.strategies.mesh",
        "dmc.training.strategies.zero",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",  # with torch's compiler
        "omegaconf",
        "scipy.io",
        "launching",
    ]
)
git_commit(), installed_packages()  # in the process that the others are forked from
gc.freeze()  # a collection in a fork would copy all that has been imported


class Processes:
    """Processes that find each other as those of torchrun do; what they print goes to `log`.

    Args:
        function: called in each process with its rank and the arguments; it must lie in a module of `tests/` itself.
        arguments: of the function.
        count: processes.
        log: file that is appended to.
    """

    def __init__(self, function, arguments, count, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log = log
        self.processes = [
            CONTEXT.Process(target=_become_rank, args=(rank, count, port, str(log), function, *arguments))
            for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def alive(self):
        """Whether all processes run."""
        return all(process.is_alive() for process in self.processes)

    def send(self, number, *ranks):
        """Send a signal to ranks and, as Slurm does, to their data workers."""
        for rank in ranks:
            process = self.processes[rank].pid
            assert process is not None
            workers = Path(f"/proc/{process}/task/{process}/children").read_text().split()
            for target in (process, *map(int, workers)):
                os.kill(target, number)

    def join(self, seconds=300, grace=20):
        """Wait for the exit codes; kill what is left after `seconds`, or `grace` seconds after a failure."""
        deadline = time.monotonic() + seconds
        failed = False
        while time.monotonic() < deadline and any(process.is_alive() for process in self.processes):
            if not failed and any(process.exitcode for process in self.processes):
                failed, deadline = True, min(deadline, time.monotonic() + grace)
            time.sleep(0.01)
        self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self):
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.join()


class Ranks(Processes):
    """The processes of one start of a run.

    Args:
        values: plain values of the run's configuration.
        count: processes.
        log: file that is appended to.
        sabotage: called with the rank in each process before it trains.
    """

    def __init__(self, values, count, log, sabotage=None):
        super().__init__(_train, (values, sabotage), count, log)


def train_ranks(values, count, log):
    """Train a run to its end with `count` processes.

    Raises:
        AssertionError: a process failed; the message holds what was printed.
    """
    with Ranks(values, count, log) as ranks:
        codes = ranks.join()
    assert codes == [0] * count, f"{codes}\n{log.read_text()[-4000:]}"


def write_corpus(folder):
    """Write made-up documents to train on and to hold out, a file each, into two folders."""
    for split, count in (("train", 60), ("held_out", 20)):
        (folder / split).mkdir()
        for number in range(count):
            lines = [f"{split} {number}: the {i}th line adds {number} and {i} to {number + i}." for i in range(12)]
            (folder / split / f"{number:03d}.txt").write_text("\n".join(lines))
    return folder


def compile_to_no_code(rank):
    """Let layers that are compiled be traced, divided into forward and backward, and run without machine code."""
    import torch

    torch.compiler.set_default_backend("aot_eager_decomp_partition")


def draw_nothing(values, path, *_, **__):
    """Make the folder of a heat map: drawing them takes a third of a short run's time."""
    path.parent.mkdir(parents=True, exist_ok=True)


def spoil_loss(rank, step, on_rank, gradient=False):
    """Make the loss not a number at one step on one rank; the gradient stays good, or is none either."""
    from dmc.training.module import RetrofitModule

    plain = RetrofitModule.training_step

    def training_step(self, schedule, batch):
        loss, metrics = plain(self, schedule, batch)
        if schedule.step == step and rank == on_rank:
            metrics["train/loss"] *= float("nan")
            loss = loss * float("nan") if gradient else loss + float("nan")
        return loss, metrics

    RetrofitModule.training_step = training_step


def note_positions(rank, log, stop=None, on_rank=0, replace=setattr):
    """Note the samples of each optimizer step that ends, and have a SIGTERM sent.

    Args:
        rank: this process.
        log: with the rank behind its name: a line for each step, its number and the positions of its samples.
        stop: whole steps, and micro-batches of the next, after which the signal comes.
        on_rank: where it comes.
        replace: sets an attribute of a class.
    """
    from dmc.training.callbacks.preemption import Preemption
    from dmc.training.module import RetrofitModule

    plain_loss, plain_stop = RetrofitModule.training_step, Preemption.stop_if_signaled
    noted = []

    def training_step(self, schedule, batch):
        noted.append(batch["position"])
        return plain_loss(self, schedule, batch)

    def stop_if_signaled(self, trainer, pl_module):
        if self.optimizer_step.is_last_micro_batch:
            with Path(f"{log}{rank}").open("a") as file:
                done = [position for batch in noted for position in batch]
                file.write(json.dumps([trainer.global_step - 1, done]) + "\n")
            noted.clear()
        if (trainer.global_step, len(noted)) == stop and rank == on_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        plain_stop(self, trainer, pl_module)

    replace(RetrofitModule, "training_step", training_step)
    replace(Preemption, "stop_if_signaled", stop_if_signaled)


def noted_positions(log, ranks=(0,)):
    """Return the steps that ranks have noted, in the order in which they ended, and the samples of each."""
    steps = {}
    for rank in ranks:
        times = collections.Counter()
        for line in Path(f"{log}{rank}").read_text().splitlines():
            step, positions = json.loads(line)
            steps.setdefault((step, times[step]), []).extend(positions)
            times[step] += 1
    return [(step, sorted(positions)) for (step, _), positions in steps.items()]


def count_scored(rank):
    """Write down beside the log how many sequences each score has read on this rank."""
    import json

    import dmc.training.measure

    plain, counts = dmc.training.measure.score_text, []

    def score_text(model, *arguments, **options):
        counts.append(0)
        hook = model.register_forward_hook(lambda module, inputs, output: _add(counts, inputs[0].shape[0]))
        try:
            return plain(model, *arguments, **options)
        finally:
            hook.remove()
            log = Path(os.readlink("/proc/self/fd/1"))
            log.with_name(f"scored_{rank}.json").write_text(json.dumps(counts))

    for name in ("measure", "calibrate", "export", "callbacks.validation"):
        sys.modules[f"dmc.training.{name}"].score_text = score_text


def _add(counts, number):
    counts[-1] += number


def _before_each_loss(act):
    """Call a function with the module and the step before every forward pass."""
    from dmc.training.module import RetrofitModule

    plain = RetrofitModule.training_step

    def training_step(self, schedule, batch):
        act(self, schedule.step)
        return plain(self, schedule, batch)

    RetrofitModule.training_step = training_step


def skip_collectives(rank, timeout):
    """Let the second rank fail before the second step's collectives, after the others have waited for them.

    Args:
        rank: this process.
        timeout: seconds that a collective waits.
    """
    import torch.distributed as dist

    def skip(module, at):
        if (rank, at) == (1, 1):
            time.sleep(2 * timeout)
            raise RuntimeError("this rank has entered no collective")

    plain = dist.init_process_group
    dist.init_process_group = lambda *args, **how: plain(*args, **how | {"timeout": timedelta(seconds=timeout)})
    _before_each_loss(skip)


def expect_exact_angles(rank):
    """Fail where RoPE's frequencies are not float32 in a forward pass."""

    def check(module, at):
        kind = module.model.model.rotary_emb.inv_freq.dtype
        assert str(kind) == "torch.float32", f"RoPE's frequencies are {kind}"

    _before_each_loss(check)


def use_hub_cache(rank, folder, replace=setattr):
    """Keep copies of what is fetched or imported in a folder of the test."""
    from huggingface_hub import constants

    replace(constants, "HF_HUB_CACHE", str(folder))


def refuse_network(rank, hub, allowed=()):
    """Stand in for the hub, which is reached over a network that refuses all ranks but some.

    Args:
        rank: this process.
        hub: folder of `model`, and of `train` and `held_out` text; every attempt to connect is noted in it.
        allowed: ranks that get through.
    """
    import datasets

    import dmc.data.hub
    import dmc.data.text

    plain = socket.socket.connect

    def connect(self, address):
        if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
            return plain(self, address)
        with (hub / f"attempts_{rank}").open("a") as file:
            file.write(f"{address}\n")
        if rank not in allowed:
            raise ConnectionRefusedError("there is no network here")
        return None

    def load_dataset(name, *_, **__):
        with socket.socket() as place:
            place.connect(("192.0.2.1", 443))
        files = sorted((hub / Path(name).name).iterdir())
        return datasets.Dataset.from_dict({"text": [path.read_text() for path in files]})

    def snapshot_download(name, **_):
        with socket.socket() as place:
            place.connect(("192.0.2.1", 443))
        return str(hub / Path(name).name)

    socket.socket.connect = connect
    dmc.data.text.load_dataset = load_dataset
    dmc.data.hub.snapshot_download = snapshot_download
    dmc.data.hub.constants.HF_HUB_CACHE = str(hub / "cache")


def prepare(rank, values, hub):
    """Prepare the text and models of a run, with a network."""
    from dmc.config import build_config
    from dmc.training.config import RunConfig
    from dmc.training.text_data import prepare_text

    refuse_network(rank, hub, allowed=(rank,))
    prepare_text(build_config(RunConfig, values))


def leave_time_to_kill(rank, seconds):
    """Make micro-batches slow, and what follows the writing of a checkpoint's tensors."""
    from dmc.training.checkpoints import CheckpointSaver

    plain_finish = CheckpointSaver._finish

    def finish(self, *arguments):
        time.sleep(3 * seconds)
        plain_finish(self, *arguments)

    _before_each_loss(lambda module, at: time.sleep(seconds))
    CheckpointSaver._finish = finish


def logged(folder, name):
    """Return a figure of every step that has one, over all starts of a run."""
    return {step: value for part in logged_parts(folder, name) for step, value in part.items()}


def logged_parts(folder, name="train/loss"):
    """Loss (or another figure) of every optimizer step that each start of a run has logged."""
    files = (folder / "logs").glob("version_*/metrics.csv")
    parts = []
    for path in sorted(files, key=lambda path: int(path.parent.name.removeprefix("version_"))):
        text = path.read_text()  # in one go, up to a whole line: a run that gains a column rewrites its file meanwhile
        rows = [row for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()) if row.get(name)]
        parts.append({int(row["step"]): float(row[name]) for row in rows})
    return parts


def logged_losses(folder):
    """Loss of every optimizer step over all starts; a step run twice counts as the later start says."""
    return logged(folder, "train/loss")


def _become_rank(rank, count, port, log, function, *arguments):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    import torch

    torch.set_num_threads(1)
    function(rank, *arguments)


def _train(rank, values, sabotage):
    from dmc.config import build_config
    from dmc.training.callbacks import validation
    from dmc.training.callbacks.preemption import EXIT_PREEMPTED, PreemptedError
    from dmc.training.config import RunConfig
    from dmc.training.run import train

    validation.draw_heatmap = draw_nothing
    if values["trainer"].get("strategy", "").startswith("deepspeed"):
        allow_cpu()
    if sabotage is not None:
        sabotage(rank)
    multiprocessing.set_start_method("fork", force=True)  # of data workers: this process was started in another way
    try:
        train(build_config(RunConfig, values))
    except PreemptedError as stop:
        print(stop, flush=True)
        sys.exit(EXIT_PREEMPTED)
