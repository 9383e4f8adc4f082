"""The experiments that `arsm reproduce` runs, at two scales. Checkpoints' paths are relative to the
runs' root.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from arsm.rl.settings import Learning
from arsm_experiments.compare import Compare
from arsm_experiments.conditional import Conditional
from arsm_experiments.control import Control
from arsm_experiments.toy import Toy
from arsm_experiments.vae import Vae

Experiment = Toy | Vae | Conditional | Control | Compare

TOY_ESTIMATORS = (
    "exact",
    "reinforce",
    "ar",
    "ars",
    "arsm",
    "rloo",
    "gumbel-softmax:temperature=0.2",
    "relax",
)
SEEDS = (0, 1, 2)
FRESH_SEEDS = (1, 2, 3)
"""Seeds that report a rate which seed 0 chose."""
RATES = (1e-4, 2e-4, 3e-4, 4e-4, 5e-4)
TRIAL_EPOCHS = 400
"""Epochs of the trials of the rows that were added last; their fresh seeds train to the end."""
BONUS = Learning(entropy=0.01)

vae_grid = partial(Vae, rates=RATES, seeds=(0,), precision="bf16")
vae_fresh = partial(Vae, name="fresh", seeds=SEEDS, precision="bf16")
two_layers = partial(vae_grid, name="two-layers", layers=2, epochs=TRIAL_EPOCHS)
two_layers_fresh = partial(vae_fresh, name="two-layers-fresh", layers=2, seeds=FRESH_SEEDS)
precision = partial(vae_fresh, name="precision-fresh", rates=(4e-4,))
one_layer_fresh = partial(vae_fresh, name="one-layer-fresh", seeds=(3, 4, 5))
"""Seeds that no row of the one-layer table has shown, at the rate that seed 0 chose."""
free_logits = vae_grid("arsm", name="free-logits", first_logit_fixed=False)
"""Its first trials ended after 400 epochs."""
free_logits_fresh = vae_fresh(
    "arsm", name="free-logits-fresh", first_logit_fixed=False, rates=(5e-4,), seeds=FRESH_SEEDS
)
algorithm2 = vae_grid(
    "arsm",
    name="algorithm2",
    layers=2,
    first_logit_fixed=False,
    afresh=True,
    rates=RATES[1:],
    epochs=TRIAL_EPOCHS,
)
algorithm2_fresh = two_layers_fresh("arsm", first_logit_fixed=False, afresh=True, rates=(2e-4,))
vae_as_released = partial(
    Vae,
    learned_temperature=True,
    kl="analytic",
    first_logit_fixed=False,
    independent_decoder_sample=False,
)
vae_recipe = partial(
    Vae,
    "arsm:pooled=True",
    name="recipe",
    dropouts=(0.2,),
    schedule="cosine",
    seeds=SEEDS,
    precision="bf16",
)
vae_regularised = partial(
    Vae,
    name="recipe",
    rates=(8e-4,),
    dropouts=(0.2,),
    weight_decay=0.03,
    schedule="cosine",
    epochs=600,
    seeds=FRESH_SEEDS,
    precision="bf16",
)
conditional_mean = partial(
    Conditional, name="mean", pixel_bias="mean", schedule="cosine", epochs=500
)
conditional_sampled = partial(Conditional, name="sampled", sampled_pixels=True, seeds=SEEDS)
conditional_recipe = partial(
    Conditional, "vimco", name="recipe", bound_samples=50, schedule="cosine", epochs=300
)
short_vae = partial(Vae, images=5_000, epochs=6, measure_every=3, bound_samples=10)
short_conditional = partial(Conditional, images=5_000, epochs=6, measure_every=3, test_samples=10)
short_control = partial(Control, methods=("arsm", "a2c", "relax"), seeds=2, log_every=5)
control_grid = partial(
    Control,
    name="grid",
    learning_rates=(0.001, 0.003, 0.01, 0.03),
    optimizers=("adam", "rmsprop"),
    seed=100,
)
figure_3 = partial(Control, episodes=500, seed=200)
lunar_lander = partial(Control, "LunarLander-v3", episodes=1600, seed=200)
LANDER = Learning(reward_scale=0.01)
LANDER_BONUS = replace(LANDER, entropy=0.01)

SMOKE: tuple[Experiment, ...] = (
    # figure 1, and the same at larger C
    Toy(estimators=TOY_ESTIMATORS, updates=1000, seeds=3),
    Toy(categories=(1_000,), steps=("printed", "scaled"), updates=300, seeds=2, trace_every=100),
    Toy(categories=(10_000,), steps=("printed", "scaled"), updates=50, seeds=2, trace_every=50),
    # table 1
    short_vae("reinforce"),
    short_vae("relax"),
    short_vae("gumbel-softmax:hard=True"),
    short_vae("25*gumbel-softmax"),
    short_vae("ar"),
    short_vae("ars"),
    short_vae("arsm"),
    short_vae("gumbel-softmax", layers=2),
    short_vae("arsm", layers=2, epochs=3),
    # table 2
    short_conditional("arsm"),
    short_conditional("straight-through"),
    short_conditional("gumbel-softmax:hard=True"),
    short_conditional("gumbel-softmax"),
    short_conditional("muprop"),
    # policy gradients
    short_control("CartPole-v0", episodes=200),
    short_control("Acrobot-v1", episodes=20),
    short_control("LunarLander-v3", episodes=20, budget=64),
    # every estimator at equal cost
    Compare(samples=50, training=50),
    Compare(
        problems=("vae",), checkpoint=Path("vae/1layer-arsm-rate0.0003"), samples=50, training=50
    ),
)
"""Every experiment of the paper and the comparison, shortened until all of them take minutes on two
cores.
"""

LATER_ESTIMATORS = ("nvil", "reinmax-rao", "imle", "aimle")

FULL: tuple[Experiment, ...] = (
    Toy(estimators=TOY_ESTIMATORS, variance_of_every_update=4),
    Toy(categories=(1_000,), steps=("printed", "scaled"), estimators=TOY_ESTIMATORS),
    # with the paper's step hardly anything moves at this C: few seeds and measurements are enough
    Toy(categories=(10_000,), estimators=TOY_ESTIMATORS, trace_every=500, seeds=5),
    Toy(categories=(10_000,), steps=("scaled",), estimators=TOY_ESTIMATORS),
    vae_grid("reinforce"),
    vae_grid("reinforce", rates=(1e-4,), seeds=(1, 2)),
    vae_grid("relax"),
    vae_grid("relax", rates=(5e-4,), seeds=(1, 2)),
    vae_grid("gumbel-softmax:hard=True"),
    vae_grid("gumbel-softmax:hard=True", rates=(3e-4,), seeds=(1, 2)),
    vae_as_released("25*gumbel-softmax:hard=True", rates=(3e-4,), seeds=SEEDS, precision="bf16"),
    vae_as_released(
        "gumbel-softmax:hard=True", name="authors", rates=(3e-4,), seeds=SEEDS, precision="bf16"
    ),
    vae_grid("ar"),
    vae_grid("ar", rates=(1e-4,), seeds=(1, 2)),
    vae_grid("ars", seeds=SEEDS),
    vae_fresh("ars", rates=(2e-4,)),
    vae_grid("arsm", seeds=SEEDS),
    vae_grid("arsm", seeds=(3, 4, 5)),
    # two precisions at one commit, with seeds that chose nothing
    precision("arsm", seeds=tuple(range(10, 16))),
    precision("arsm", seeds=tuple(range(20, 26)), precision="float32"),
    # 200 free logits, as the paper's table of networks has them
    free_logits,
    free_logits_fresh,
    Vae("arsm", name="tf32", rates=(3e-4,), seeds=SEEDS),
    Vae("arsm", name="tf32", rates=(4e-4,), seeds=SEEDS),
    Vae("arsm", name="float32", rates=(3e-4,), seeds=SEEDS, precision="float32"),
    Vae("arsm", name="float32", rates=(4e-4,), seeds=SEEDS, precision="float32"),
    vae_grid("arsm:pooled=True"),
    vae_fresh("arsm:pooled=True", rates=(3e-4,)),
    vae_grid("rloo:samples=46,live=1"),
    vae_fresh("rloo:samples=46,live=1", rates=(3e-4,)),
    vae_grid("rloo:samples=46,live=1,ridge=1.0"),
    vae_fresh("rloo:samples=46,live=1,ridge=1.0", rates=(2e-4,)),
    # rows whose first seed chose their rate: seeds that chose nothing, or a third one beside two
    one_layer_fresh("relax", rates=(5e-4,)),
    vae_grid("gumbel-softmax:hard=True", rates=(3e-4,), seeds=(3,)),
    vae_grid("ar", rates=(1e-4,), seeds=(3,)),
    vae_grid("reinforce", rates=(1e-4,), seeds=(3,)),
    vae_recipe(layers=1, rates=(8e-4,), epochs=900),
    vae_regularised("arsm:pooled=True"),
    vae_grid("gumbel-softmax", layers=2),
    vae_fresh("gumbel-softmax", layers=2, rates=(4e-4,)),
    vae_as_released(
        "gumbel-softmax:hard=True", layers=2, rates=(3e-4,), seeds=SEEDS, precision="bf16"
    ),
    vae_grid(
        "arsm",
        name="algorithm2",
        layers=2,
        first_logit_fixed=False,
        afresh=True,
        rates=(1e-4,),
        seeds=SEEDS,
    ),
    # rivals with the settings of the one-layer rows; seed 0 chooses the rate, fresh seeds report it
    two_layers("gumbel-softmax:hard=True"),
    two_layers_fresh("gumbel-softmax:hard=True", rates=(5e-4,)),
    two_layers("rloo:samples=46,live=1"),
    two_layers("arsm:pooled=True"),
    # the published runs of these two ended after 460 and 850 epochs, with the GPU's time
    two_layers_fresh("rloo:samples=46,live=1", rates=(1e-4,)),
    two_layers_fresh("arsm:pooled=True", rates=(1e-4,)),
    algorithm2,
    algorithm2_fresh,
    vae_grid("arsm", layers=2, rates=(1e-4,), seeds=SEEDS),
    vae_grid(
        "arsm",
        name="as-released",
        layers=2,
        first_logit_fixed=False,
        afresh=True,
        as_released=True,
        rates=(1e-4,),
        seeds=SEEDS,
    ),
    vae_recipe(layers=2, rates=(4e-4,), epochs=800),
    vae_regularised("gumbel-softmax:hard=True"),
    vae_regularised("rloo:samples=46,live=1"),
    vae_regularised("arsm:pooled=True", layers=2, rates=(4e-4,), epochs=800),
    Conditional("arsm", seeds=SEEDS),
    Conditional("arsm:pooled=True", seeds=SEEDS),
    Conditional("rloo:samples=46,live=1", seeds=SEEDS),
    Conditional("straight-through", seeds=SEEDS),
    Conditional("gumbel-softmax:hard=True", seeds=SEEDS),
    Conditional("gumbel-softmax", seeds=SEEDS),
    Conditional("muprop", seeds=SEEDS),
    Conditional("ars", seeds=SEEDS),
    Conditional("reinforce", seeds=SEEDS),
    Conditional("vimco", bound_samples=10, seeds=SEEDS),
    # on the images of Jang et al., from whom the paper's table has its other rows
    conditional_sampled("arsm"),
    conditional_sampled("straight-through"),
    conditional_sampled("gumbel-softmax:hard=True"),
    conditional_sampled("gumbel-softmax"),
    # replicas that take turns train faster in processes of their own
    *(conditional_sampled("muprop", seeds=(seed,)) for seed in SEEDS),
    conditional_sampled("rloo:samples=46,live=1"),
    # its third seed overflowed there: again in a process of its own
    conditional_sampled("rloo:samples=46,live=1", seeds=(2,)),
    conditional_recipe(rates=(1e-3, 3e-3), dropouts=(0.0, 0.1)),
    conditional_recipe(rates=(3e-3,), dropouts=(0.1,), seeds=(1, 2)),
    Conditional("arsm", name="mean", pixel_bias="mean", seeds=SEEDS),
    conditional_mean("arsm", name="mean-long", epochs=2000, rates=(1e-3,), seeds=SEEDS),
    conditional_mean("arsm", rates=(1e-3, 4e-3)),
    conditional_mean("arsm", rates=(2e-3,), seeds=SEEDS),
    conditional_mean("arsm:pooled=True", rates=(1e-3,), seeds=SEEDS),
    conditional_mean("rloo:samples=46,live=1", rates=(2.5e-4, 1e-3)),
    conditional_mean("rloo:samples=46,live=1", rates=(5e-4,), seeds=SEEDS),
    conditional_mean("gumbel-softmax", rates=(1e-3,), seeds=SEEDS),
    conditional_mean("muprop", rates=(1e-3,), seeds=SEEDS),
    conditional_recipe(name="mean", pixel_bias="mean", rates=(3e-3,), dropouts=(0.1,), seeds=SEEDS),
    # results/control/PROTOCOL.md: grids, then the reported seeds
    control_grid("CartPole-v0", ("arsm",), episodes=300, seeds=1),
    control_grid("CartPole-v0", ("a2c", "relax"), episodes=500, seeds=1, learning=BONUS),
    control_grid("Acrobot-v1", ("arsm",), episodes=400, seeds=2, learning=BONUS),
    control_grid("Acrobot-v1", ("a2c", "relax"), episodes=500, seeds=2, learning=BONUS),
    control_grid(
        "LunarLander-v3",
        ("a2c", "relax"),
        episodes=1200,
        seeds=1,
        log_every=20,
        learning=LANDER_BONUS,
    ),
    control_grid(
        "LunarLander-v3",
        ("arsm",),
        learning_rates=(0.01, 0.03),
        episodes=1200,
        cpu_seconds=150,
        seeds=1,
        log_every=5,
        learning=LANDER,
    ),
    figure_3("CartPole-v0", ("arsm",), (0.03,), ("rmsprop",)),
    figure_3("CartPole-v0", ("a2c",), (0.03,), learning=BONUS),
    figure_3("CartPole-v0", ("a2c",), (0.01,)),
    figure_3("CartPole-v0", ("relax",), (0.003,), learning=BONUS),
    figure_3("Acrobot-v1", ("arsm", "ars"), (0.01,), learning=BONUS),
    figure_3("Acrobot-v1", ("a2c",), (0.01,), ("rmsprop",), learning=BONUS),
    figure_3("Acrobot-v1", ("relax",), (0.01,), learning=BONUS),
    lunar_lander(
        ("arsm", "ars"), (0.01,), ("rmsprop",), cpu_seconds=400, log_every=5, learning=LANDER
    ),
    lunar_lander(
        ("arsm",),
        (0.01,),
        ("rmsprop",),
        cpu_seconds=1500,
        seeds=5,
        seed=210,
        log_every=5,
        learning=LANDER,
    ),
    lunar_lander(
        ("arsm",),
        (0.01,),
        ("rmsprop",),
        cpu_seconds=4000,
        seeds=2,
        seed=220,
        log_every=5,
        learning=LANDER,
    ),
    lunar_lander(("a2c",), (0.003,), log_every=20, learning=LANDER_BONUS),
    lunar_lander(("relax",), (0.01,), ("rmsprop",), log_every=20, learning=LANDER_BONUS),
    Compare(problems=("toy-30", "toy-1000"), samples=10_000),
    Compare(
        problems=("network-0.1", "network-1", "network-3", "network-6", "binary-1", "binary-3")
    ),
    Compare(problems=("network-3", "network-6"), estimators=("floor",), name="floor"),
    # estimators that came after the runs above
    Compare(
        problems=("toy-30", "toy-1000"), estimators=LATER_ESTIMATORS, samples=10_000, name="later"
    ),
    Compare(
        problems=("network-0.1", "network-1", "network-3", "network-6"),
        estimators=LATER_ESTIMATORS,
        name="later",
    ),
    Compare(problems=("vae",), checkpoint=Path("vae/1layer-arsm-rate0.0004"), samples=300),
    Vae("gumbel-softmax:hard=True", name="short", rates=(3e-4,), epochs=200, measure_every=20),
    Compare(
        problems=("vae",),
        checkpoint=Path("vae/short-1layer-gumbel-softmax-hard=True-rate0.0003"),
        samples=300,
    ),
)
"""The commands that the committed results were made with, and those whose runs are still
missing.
"""
