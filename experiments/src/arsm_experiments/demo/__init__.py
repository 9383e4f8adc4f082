"""The demo: one page that shows a choice, a latent code, a sequence task, an agent and the
referee.
"""
