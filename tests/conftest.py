import torch
from hypothesis import settings

torch.set_num_threads(1)  # pytest -n runs as many processes as there are cores
settings.register_profile("arsm", deadline=None, derandomize=True)
settings.load_profile("arsm")
