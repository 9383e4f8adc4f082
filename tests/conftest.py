import os
import signal

import pytest
import torch
from hypothesis import settings

# some virtual machines announce matrix tiles (AMX) that they cannot run: the first product in
# bfloat16 would end the process
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
torch.set_num_threads(1)  # pytest -n runs as many processes as there are cores
# shells have it ignored in what they start in the background
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("arsm", deadline=None, derandomize=True)
settings.load_profile("arsm")


@pytest.fixture(autouse=True)
def same_weights_on_every_run() -> None:
    """Modules draw their first weights from torch's own generator."""
    torch.manual_seed(0)
