"""Hygiene around every test: seeded, and failed if it leaves something behind.

A leak shows up far from its cause (a later test hangs, or passes only in this order), so the test
that leaks is the one that fails.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SEED = 1234
THREAD_GRACE_S = 2.0
# Set by libraries when they are imported or first used, whatever the test does.
LIBRARY_VARIABLES = {
    "CUDA_MODULE_LOADING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
}

# For the processes that tests start: one thread a rank, the package's sources, loopback only, and
# no search for models or versions on a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_PATHS = [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(p for p in _PATHS if p)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from one state of every global generator that is loaded."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _leaves_no_variables() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and name not in LIBRARY_VARIABLES
    }
    for name in changed:  # so that only the guilty test fails
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test changed environment variables: {sorted(changed)}"


@pytest.fixture(autouse=True)
def _leaves_no_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + THREAD_GRACE_S
    new = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread.name for thread in new if thread.is_alive()]
    assert not alive, f"the test left threads running: {alive}"


@pytest.fixture(autouse=True)
def _leaves_no_process_group() -> Iterator[None]:
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a torch.distributed process group; destroy it")
