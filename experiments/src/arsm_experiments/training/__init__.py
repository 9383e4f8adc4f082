"""Training replicas of one model on MNIST, as the VAE and conditional MNIST do.

`options.py` has the options that these experiments share and the methods that each must define,
`loop.py` trains and writes checkpoints, `measure.py` evaluates, `pictures.py` writes sheets of
images, `processes.py` joins processes.
"""
