"""Ranks in processes of their own, on one machine: the first is this process, and tells the others what to do.

A worker reads pickled messages from its standard input until that ends, so that it never outlives this process.
Tensors go over `torch.distributed` alone: NCCL where the ranks have a GPU each, gloo on a CPU.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pagedserve.engine.model.load import LoadedModel, load_model
from pagedserve.engine.parallel.communicator import GroupCommunicator
from pagedserve.engine.parallel.ranks import Message
from pagedserve.engine.parallel.shards import CannotShard, Shard
from pagedserve.engine.parallel.worker import Worker

CLOSING_S = 20.0
UP, READY = "up", "ready"


class RankEnded(RuntimeError):
    """A worker process has ended, so that the model is incomplete."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank loads, and where it meets the others."""

    shard: Shard
    port: int
    model: str
    dtype: str
    device: str
    attention: str
    max_model_len: int | None
    kv_cache_dtype: str
    num_threads: int

    @property
    def own_device(self) -> str:
        """A GPU for each rank; the CPU for all of them."""
        return f"cuda:{self.shard.rank}" if self.device.startswith("cuda") else self.device

    def load(self, progress: bool = False) -> LoadedModel:
        """Meet the other ranks and load this one's part of the model."""
        torch.set_num_threads(self.num_threads)
        is_cuda = self.device.startswith("cuda")
        if is_cuda:
            torch.cuda.set_device(self.shard.rank)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            init_method=f"tcp://127.0.0.1:{self.port}",
            rank=self.shard.rank,
            world_size=self.shard.size,
        )
        return load_model(
            self.model,
            dtype=self.dtype,
            device=self.own_device,
            attention=self.attention,
            max_model_len=self.max_model_len,
            kv_cache_dtype=self.kv_cache_dtype,
            progress=progress,
            shard=self.shard,
            communicator=GroupCommunicator(self.shard),
        )


class ProcessRanks:
    """See `Ranks`."""

    def __init__(self, specs: list[RankSpec]) -> None:
        """Start a worker for each of the specs, which are those of ranks 1, 2, ..."""
        self.size = len(specs) + 1
        command = [sys.executable, "-m", "pagedserve.engine.parallel.processes"]
        self._workers: list[subprocess.Popen[bytes]] = [
            # In sessions of their own: Ctrl-C in a terminal is for rank 0, which lets its requests finish.
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            for _ in specs
        ]
        for worker, spec in zip(self._workers, specs, strict=True):
            self._write(worker, pickle.dumps(asdict(spec)))

    def wait_for(self, word: str) -> None:
        """Return when all have said it: that they are up, that they have loaded their parts.

        `CannotShard` says what went wrong.
        """
        for rank, worker in enumerate(self._workers, start=1):
            assert worker.stdout is not None
            said = worker.stdout.readline().decode(errors="replace").strip()
            if said != word:
                self.close()
                raise CannotShard(f"rank {rank} of {self.size} could not start: {said or 'it ended'}")

    def send(self, message: Message) -> None:
        """See `Ranks.send`."""
        content = pickle.dumps(message)
        for worker in self._workers:
            self._write(worker, content)

    def close(self) -> None:
        """See `Ranks.close`. Workers that do not end by themselves are killed."""
        for worker in self._workers:
            if worker.stdin is not None:
                with suppress(OSError):
                    worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _write(self, worker: subprocess.Popen[bytes], content: bytes) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(content)
            worker.stdin.flush()
        except (OSError, ValueError) as error:
            raise RankEnded(f"a rank of {self.size} has ended ({error}); the engine cannot go on") from error


def load_sharded(
    name_or_path: str | Path,
    size: int,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attention: str = "auto",
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    progress: bool = True,
) -> LoadedModel:
    """As `load_model`, over ``size`` ranks; the model's ``ranks`` have to be closed at the end.

    Raises `CannotShard` for a model that does not divide, for more ranks than there are GPUs, in a process that has
    a process group already, and if a worker cannot start.
    """
    if device.startswith("cuda") and torch.cuda.device_count() < size:
        raise CannotShard(
            f"tensor_parallel_size is {size}; there are {torch.cuda.device_count()} CUDA devices"
        )
    if dist.is_initialized():
        raise CannotShard("this process belongs to a process group already: one sharded model a process")
    threads = max(1, torch.get_num_threads() // size)
    own = (str(name_or_path), dtype, device, attention, max_model_len, kv_cache_dtype, threads)
    port = _free_port()
    specs = [RankSpec(Shard(rank, size), port, *own) for rank in range(size)]
    ranks = ProcessRanks(specs[1:])
    try:
        ranks.wait_for(UP)  # or rank 0 would wait for the others as long as torch's time-out
        loaded = specs[0].load(progress)
        ranks.wait_for(READY)
    except BaseException:
        ranks.close()
        raise
    loaded.model.ranks = ranks
    return loaded


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """A worker: a spec, then messages, from standard input; `UP` and `READY` to standard output, or what is wrong."""
    told, said = sys.stdin.buffer, sys.stdout
    print(UP, file=said, flush=True)
    given = pickle.load(told)
    spec = RankSpec(**{**given, "shard": Shard(**given["shard"])})
    try:
        worker = Worker(spec.load().model)
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=said, flush=True)
        sys.exit(1)
    print(READY, file=said, flush=True)
    while True:
        try:
            message = pickle.load(told)
        except EOFError:
            return
        worker.take(message)


if __name__ == "__main__":
    main()
