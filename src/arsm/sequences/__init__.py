"""Policy gradients for autoregressive models: generate, branch, give credit token by token."""

from arsm.sequences.batch import Batch, Branches, SequenceEstimate, Strategy, TokenCredit
from arsm.sequences.cluster import Cluster
from arsm.sequences.comparison import compare
from arsm.sequences.decode import Completions, Decoding, Prefixes, complete
from arsm.sequences.draws import Sampled
from arsm.sequences.driver import estimate
from arsm.sequences.ends import Ends, Stop, live_tokens
from arsm.sequences.engines import Engine, EngineFailure, Server
from arsm.sequences.importance import Importance
from arsm.sequences.measured import Comparison, Measured
from arsm.sequences.model import Model, Recompute, SlotModel, SlotsRefused, State, pad_before
from arsm.sequences.rewards import Reward, RewardFailure
from arsm.sequences.slots import Slots
from arsm.sequences.strategies import Branch, Group, by_likelihood
from arsm.sequences.text import TextReward
from arsm.sequences.transformers import Transformers
from arsm.sequences.waves import Waves, decoder

__all__ = [
    "Batch",
    "Branch",
    "Branches",
    "Cluster",
    "Comparison",
    "Completions",
    "Decoding",
    "Ends",
    "Engine",
    "EngineFailure",
    "Group",
    "Importance",
    "Measured",
    "Model",
    "Prefixes",
    "Recompute",
    "Reward",
    "RewardFailure",
    "Sampled",
    "SequenceEstimate",
    "Server",
    "SlotModel",
    "Slots",
    "SlotsRefused",
    "State",
    "Stop",
    "Strategy",
    "TextReward",
    "TokenCredit",
    "Transformers",
    "Waves",
    "by_likelihood",
    "compare",
    "complete",
    "decoder",
    "estimate",
    "live_tokens",
    "pad_before",
]
