"""Run folders: the files of an experiment, safe if it is killed at any moment.

    runs/<experiment>/<name>/
        config.json      group and label, the configuration, one session for each start and resume,
                         whether it finished
        metrics.jsonl    one flat object per line: step, seed (if any), seconds and the metrics
        checkpoint.pt    the state at the last checkpoint, its step, and how much of metrics.jsonl
                         belongs to it
        events.*         the same metrics for TensorBoard

A checkpoint replaces the previous one in a single rename, once its metrics are on disk. Resuming
cuts metrics.jsonl back to the checkpoint: a run that was killed and resumed leaves the same file as
an uninterrupted one, except for its seconds. Published runs are kept without checkpoints, in one
archive per experiment:

    runs/<experiment>.tar.xz
"""
