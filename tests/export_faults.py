"""Faults of single ranks, most of them while a divided model is exported; called with the rank before it trains."""

import os
import resource
import signal
import time


def fill_disk(rank, on_rank):
    """Let one rank write no more than 1,000 bytes into any file of the weights."""
    import dmc.training.export

    def write_parts(*arguments):
        plain_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, plain_limits[1]))  # Python turns its signal into an OSError
        try:
            plain(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, plain_limits)

    plain = dmc.training.export.write_parts
    if rank == on_rank:
        dmc.training.export.write_parts = write_parts


def kill_while_writing(rank, on_rank):
    """Kill one rank where it writes its parts of the weights."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    if rank == on_rank:
        HuggingFaceStorageWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def fail_to_join(rank):
    """Let the first rank find a part cut off that it joins."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    def finish(self, metadata, results):
        for name in os.listdir(self.path):
            os.truncate(os.path.join(self.path, name), 100)
        plain(self, metadata, results)

    plain = HuggingFaceStorageWriter.finish
    HuggingFaceStorageWriter.finish = finish


def fail_to_complete(rank):
    """Let the model's generation settings be refused where the first rank writes them beside the weights."""
    from transformers import GenerationConfig

    GenerationConfig.save_pretrained = refuse


def refuse(*_, **__):
    raise ValueError("these settings are refused")


def fail_to_describe(rank):
    """Let the first rank fail to write what stands beside the weights, once these are complete."""
    import dmc.training.export

    dmc.training.export.describe = refuse


def see_an_old_checkpoint(rank):
    """Let the second rank see the checkpoints of a moment ago, as another node may through its file system's cache."""
    import dmc.training.run
    from dmc.training.checkpoints import saved_checkpoints

    if rank == 1:
        dmc.training.run.find_checkpoint = lambda folder, *_: saved_checkpoints(folder)[1]


def write_slowly(rank, on_rank):
    """Let one rank take a second for each checkpoint that it writes in the background."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    def write_data(self, *arguments):
        time.sleep(1)
        return plain(self, *arguments)

    plain = HuggingFaceStorageWriter.write_data
    if rank == on_rank:
        HuggingFaceStorageWriter.write_data = write_data
