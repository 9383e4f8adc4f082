"""Environments of Gymnasium rebuilt to run faster, behind `arsm.rl.environment.Environment`.

CartPole and Acrobot are bit for bit Gymnasium's, as arrays of any number of episodes; LunarLander
is bit for bit Gymnasium's with less Python; FrozenLake, CliffWalking and Taxi are tables with
Gymnasium's transitions. `arsm.rl.make_environment` finds them by the entry points
"arsm.environments" of this package; without this package it takes Gymnasium's own.
"""
