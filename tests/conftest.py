"""Settings of every test run."""

import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # tiny tensors on two threads cost more in waiting than in work
settings.register_profile("ordinary", deadline=None)  # a slow machine is no failure
settings.load_profile("ordinary")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton loads; kernels then run on the host


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory):
    """A kernel store of the whole run: what one test has built, another does not build again."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def store(kernel_folder):
    """The store over that folder."""
    from codegen.store import KernelStore

    return KernelStore(kernel_folder)
