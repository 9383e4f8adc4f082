"""Is this gradient right? Anybody's estimator against enumeration, at a declared false-alarm rate."""

from arsm.audit.advantages import audit_advantages
from arsm.audit.diagnose import Finding
from arsm.audit.problems import PROBLEMS, Problem
from arsm.audit.referee import audit
from arsm.audit.result import Audit
from arsm.audit.sequences import audit_sequences

__all__ = ["PROBLEMS", "Audit", "Finding", "Problem", "audit", "audit_advantages", "audit_sequences"]
