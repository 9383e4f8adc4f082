"""tunix 0.1.7 alone: PPO cuts rewards to whole numbers.

PPOLearner puts them into zeros_like(completion ids), an array of integers: 0.9 and 0.2 become 0,
1.9 becomes 1. Its learner is run with stand-ins for models. pip install google-tunix==0.1.7
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from tunix import PPOConfig, PPOLearner

tokens = np.array([[2, 3, 1], [3, 2, 1]])


def returns(rewards: list[float]) -> np.ndarray:
    """What PPO wants the critic to predict at the first token: the reward, with a critic of 0."""
    learner = PPOLearner.__new__(PPOLearner)
    learner.algo_config = PPOConfig(beta=0.0, gae_lambda=1.0)
    learner.metric_fns, learner._use_reward_model = [], False
    learner._rollout_micro_batch_size = learner._compute_logps_micro_batch_size = None
    learner._compute_rewards = lambda **_: np.array(rewards, dtype=np.float32)
    zeros = jnp.zeros((2, 4))
    learner.rl_cluster = SimpleNamespace(
        cluster_config=SimpleNamespace(rollout_config=SimpleNamespace(max_tokens_to_generate=3)),
        rollout=SimpleNamespace(pad_id=lambda: 0, eos_id=lambda: 1),
        generate=lambda **_: SimpleNamespace(
            tokens=tokens, left_padded_prompt_tokens=np.array([[2], [2]]), text=["", ""]
        ),
        get_old_per_token_logps=lambda **_: zeros[:, :3],
        get_values=lambda **_: zeros,
        buffer_metrics=lambda *_, **__: None,
    )
    found = learner._generate_and_compute_advantage({"prompts": ["", ""]})
    return np.asarray(found.returns)[:, 0]


for rewards in ([0.9, 0.2], [1.9, 0.2], [3.0, 1.0]):
    print(f"rewards {rewards}: returns {returns(rewards)}")
array = jnp.zeros(tokens.shape).at[jnp.arange(2), 2].add(jnp.array([0.9, 0.2]))
print(f"with zeros of float (mended): {array[:, 2]}")
