"""Runs a function on several ranks: as real gloo processes, or as threads on a ThreadHub.

A rank's own traceback is in the failure that the test shows; nothing outlives the time limit.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from lightning_dpipe.core.errors import RankError
from lightning_dpipe.runtime.threads import ThreadHub

# autograd.backward imports symbolic_shapes (0.3 s) on its first call: pay once, in the server.
_PRELOAD = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes"]
_GRACE_S = 3.0  # for the other ranks to report after the first failure


class RankFailureError(AssertionError):
    """One or more ranks failed, died or did not end in time."""


def run_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Call ``fn(rank, *args)`` in `num_ranks` gloo processes of one thread each.

    `fn` is a module-level function; its result is pickled back. Collectives and messages time out
    after `timeout_s`, so does the whole call.

    Returns:
        The results, by rank.

    Raises:
        RankFailureError: With the traceback of the rank that failed first.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="dpipe-ranks-") as folder:
        job = pickle.dumps((fn, args, num_ranks, os.path.join(folder, "store"), timeout_s))
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=_main, args=(rank, job, theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            answers = _collect(pipes, processes, time.monotonic() + timeout_s)
            for pipe in pipes:
                pipe.close()  # the signal to leave
            for child in processes:
                child.join(5.0)
            return answers
        finally:
            for child in processes:
                child.kill()
                child.join()


def _collect(pipes: list[Connection], processes: list[BaseProcess], deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, bool, str]] = []  # rank, only a consequence, text
    open_ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_ranks and (left_s := deadline_s - time.monotonic()) > 0:
        for pipe in wait(list(open_ranks), timeout=left_s):
            assert isinstance(pipe, Connection)
            rank = open_ranks.pop(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5.0)
                failures.append((rank, False, f"died, exit code {processes[rank].exitcode}"))
            else:
                if kind == "result":
                    results[rank] = value
                else:
                    failures.append((rank, kind == "consequence", value))
            if failures:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    if failures:
        failures.sort(key=lambda failure: failure[1])  # stable: first cause, then the rest
        raise RankFailureError("\n".join(f"rank {rank}: {text}" for rank, _, text in failures))
    if open_ranks:
        raise RankFailureError(f"ranks {sorted(open_ranks.values())} did not end in time")
    return [results[rank] for rank in range(len(pipes))]


def _main(rank: int, job: bytes, pipe: Connection) -> None:
    """Body of one process; unless it failed it leaves only when the parent has heard from all."""
    torch.set_num_threads(1)
    faulthandler.enable()
    failed = True
    try:
        fn, args, num_ranks, store, timeout_s = pickle.loads(job)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        payload = pickle.dumps(("result", fn(rank, *args)))
        failed = False
    except RankError:
        payload = pickle.dumps(("consequence", traceback.format_exc()))
    except BaseException:
        payload = pickle.dumps(("error", traceback.format_exc()))
    pipe.send_bytes(payload)
    if not failed:  # a failed rank goes at once, as it would in a job: its peers must notice
        with contextlib.suppress(EOFError):
            pipe.recv_bytes()
    os._exit(int(failed))  # skips gloo's teardown, in which a vanished peer is fatal


def run_threads(
    fn: Callable[[int, ThreadHub], Any],
    num_ranks: int,
    *,
    hub: ThreadHub | None = None,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call ``fn(rank, hub)`` in `num_ranks` threads and return the results, by rank.

    The first error aborts the hub, so that the other threads end, and is raised here.
    """
    joint = hub or ThreadHub(num_ranks, timeout_s=timeout_s)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank, joint)
        except BaseException as error:
            errors.append(error)
            joint.abort(error, rank)

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if errors:
        raise next((e for e in errors if not isinstance(e, RankError)), errors[0])
    late = [rank for rank in range(num_ranks) if rank not in results]
    if late:
        joint.abort(TimeoutError(f"{timeout_s} s are over"))
        raise RankFailureError(f"threads of ranks {late} did not end within {timeout_s} s")
    return [results[rank] for rank in range(num_ranks)]
