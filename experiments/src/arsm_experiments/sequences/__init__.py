"""Token-level credit on four tasks of reasoning-gym; the modules that run on a GPU import torch and
arsm alone.
"""
