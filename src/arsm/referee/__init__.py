"""Is this gradient right? Anybody's estimator against enumeration, at a declared
false-alarm rate.
"""

from arsm.referee.advantages import audit_advantages
from arsm.referee.diagnose import Finding
from arsm.referee.losses import audit
from arsm.referee.problems import PROBLEMS, Problem
from arsm.referee.result import Audit
from arsm.referee.sequences import audit_sequences
from arsm.referee.worlds import Objective, TrainerBatch

__all__ = [
    "PROBLEMS",
    "Audit",
    "Finding",
    "Objective",
    "Problem",
    "TrainerBatch",
    "audit",
    "audit_advantages",
    "audit_sequences",
]
