"""Training replicas of one model on MNIST, as the VAE and conditional MNIST do.

`options.py` has the options that these experiments share and what an experiment says of itself, `loop.py` trains and
checkpoints, `measure.py` evaluates, `pictures.py` writes sheets of images, `processes.py` joins several processes.
"""
