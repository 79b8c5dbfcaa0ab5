"""Settings of every test run."""

import torch

torch.set_num_threads(1)  # tiny tensors on two threads cost more in waiting than in work
