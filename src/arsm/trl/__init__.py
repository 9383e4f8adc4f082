"""Token credit inside TRL's GRPOTrainer."""

try:
    from arsm.trl.noise import Noise, gradient_noise
    from arsm.trl.trainer import BranchTrainer
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ModuleNotFoundError(
        "arsm.trl needs TRL; install it with `pip install 'arsm[trl]'`.", name="trl"
    ) from None

__all__ = ["BranchTrainer", "Noise", "gradient_noise"]
