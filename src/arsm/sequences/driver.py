"""`estimate`: from prompts, a model and a reward to a gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arsm.sequences.batch import Batch, Branches, Estimate, Strategy, token_log_probs
from arsm.sequences.checks import (
    Reward,
    check_cache,
    check_length,
    check_model,
    check_options,
    check_prompts,
    check_reward,
    checked_completions,
    checked_mismatch,
    checked_rewards,
    given_completions,
    given_log_probs,
)
from arsm.sequences.decode import Completions, Decoding, Prefixes, complete, live_tokens
from arsm.sequences.engines import Engine
from arsm.sequences.model import Model, one_pass, pad_before


def estimate(
    strategy: Strategy,
    model: Model,
    prompts: Tensor,
    reward: Reward,
    *,
    max_tokens: int,
    eos: int | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    completions: Tensor | None = None,
    log_probs: Tensor | None = None,
    reference: Model | None = None,
    kl: float = 0.0,
    max_rows: int = 1024,
    engine: Engine | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate the expected reward of a model's completions, and its gradient.

    Args:
        strategy: how credit is given: `Branch(arsm.RLOO(8))` token by token, `Group(8)` sequence by sequence.
        model: a `Model`, such as `Recompute(module)` or `Transformers(model)`.
        prompts: [N, P] int64.
        reward: `reward(prompts [R, P], tokens [R, max_tokens]) -> [R]`, floating. Tokens after the end are eos.
        max_tokens: T, the most tokens of a completion.
        eos: the token that ends a sequence; None where every completion has max_tokens tokens.
        temperature: the tokens are drawn from softmax(logits / temperature).
        mask: [N, P] bool, true for tokens of the prompt, where prompts are padded; or a tokenizer's attention mask.
        completions: [N, T], or [N, n, T] for a `Group`: true sequences that another sampler drew from this model.
        log_probs: shaped like the completions: that sampler's ln p, to be compared with the model's.
        reference: a model to stay close to.
        kl: the cost of ln p - ln p_reference, per token.
        max_rows: maximum rows per call of the model, whatever the number of prompts; where there are more true
            sequences, their graph is computed again in the backward pass. What stays are their logits [N, T, V]; for
            more prompts than fit, call `estimate` for some at a time and add up the gradients.
        engine: who samples: a `Server`, or a `Cluster` of Ray actors; None for this process.
        generator: where all randomness comes from.

    Returns:
        An `Estimate`; `(-out.value.mean()).backward()` gives the parameters the gradient of the loss.
    """
    check_prompts(prompts, mask)
    check_reward(reward)
    check_options(max_tokens, eos, temperature, kl, reference, max_rows, completions, log_probs, engine)
    given = prompts
    if mask is not None:
        prompts, mask = pad_before(prompts, mask.bool())
    for each in (model, reference):
        check_length(each, prompts, mask, max_tokens)
    with torch.no_grad():
        one = prompts.amax(-1).argmax(-1, keepdim=True)  # the prompt with the largest token, should it be unknown
        one = prompts[one], None if mask is None else mask[one]
        vocabulary = check_model(strategy, model, *one, eos)
        if completions is not None:  # nothing will be sampled along which the two could be compared
            check_cache(model, *one)
    decoding = Decoding(max_tokens, eos, temperature, max_rows)

    def finish(prompts: Tensor, mask: Tensor | None, prefixes: Prefixes) -> Completions:
        if engine is None:
            return complete(model, prompts, mask, prefixes, decoding, generator)
        return checked_completions(engine.complete(prompts, mask, prefixes, decoding, generator), vocabulary)

    copies = strategy.samples or 1
    row = torch.arange(prompts.shape[0], device=prompts.device).repeat_interleave(copies)
    shape = (prompts.shape[0], max_tokens) if strategy.samples is None else (prompts.shape[0], copies, max_tokens)
    if completions is None:
        sampled = finish(prompts, mask, Prefixes.bare(row, max_tokens))
        tokens, sampler = sampled.tokens, sampled.log_probs
    else:
        tokens = given_completions(completions, shape, eos, vocabulary).flatten(0, -2)
        sampler = None if log_probs is None else given_log_probs(log_probs, completions, shape, eos).flatten(0, -2)
    live = live_tokens(tokens, eos)
    rows, rows_mask = prompts[row], None if mask is None else mask[row]
    logits = _logits(model, rows, tokens, rows_mask, max_rows)
    if logits.shape != (*tokens.shape, vocabulary):
        raise ValueError(
            f"model.logits must return {[*tokens.shape, vocabulary]}, but returned {list(logits.shape)}; entry [:, t] "
            "holds the logits that token t is drawn from."
        )
    own = token_log_probs(logits.detach(), tokens, temperature)
    elsewhere = completions is not None or engine is not None
    info = {"mismatch": checked_mismatch(own, sampler, live, logits.dtype, elsewhere=elsewhere)}

    def costs(which: Tensor, tokens: Tensor, log_p: Tensor, counts: Tensor) -> Tensor:
        if reference is None or not tokens.shape[0]:
            return torch.zeros_like(log_p)
        ratio = torch.zeros_like(log_p)
        for part in torch.arange(tokens.shape[0], device=tokens.device).split(max_rows):
            some, some_mask = prompts[which[part]], None if mask is None else mask[which[part]]
            with torch.no_grad():
                of_reference = one_pass(reference, some, tokens[part], some_mask)
            if of_reference.shape[-1] != vocabulary:
                raise ValueError(
                    f"The reference has a vocabulary of {of_reference.shape[-1]} tokens, but the model's has "
                    f"{vocabulary}; they must share one."
                )
            log_q = token_log_probs(of_reference, tokens[part], temperature)
            ratio[part] = torch.where(counts[part], log_p[part] - log_q.to(log_p.dtype), 0)
        return ratio

    rewards = checked_rewards(reward, given[row], tokens)
    ratio = costs(row, tokens, own.double(), live)
    returns = rewards.unsqueeze(-1) - kl * _from_here_on(ratio)
    generated = int(live.sum()) if completions is None else 0

    def play(prefixes: Prefixes) -> Branches:
        nonlocal generated
        played = finish(rows, rows_mask, prefixes)
        after = torch.arange(max_tokens, device=tokens.device) >= prefixes.step.unsqueeze(-1)
        after = after & live_tokens(played.tokens, eos)
        generated += int(after.sum())
        which = row[prefixes.row]
        reached = checked_rewards(reward, given[which], played.tokens)
        log_p = played.log_probs
        if reference is not None:  # an engine does not know ln p of a token that it was given
            at = logits.detach()[prefixes.row, prefixes.step]
            first = token_log_probs(at, played.tokens.gather(-1, prefixes.step.unsqueeze(-1)).squeeze(-1), temperature)
            log_p = log_p.scatter(-1, prefixes.step.unsqueeze(-1), first.to(log_p.dtype).unsqueeze(-1))
        cost = costs(which, played.tokens, log_p, after).sum(-1)
        return Branches(prefixes.row, prefixes.step, prefixes.action, played.tokens, reached, reached - kl * cost)

    batch = Batch(rows, rows_mask, tokens, live, logits, temperature, returns, generator, play)
    surrogate, branches = strategy.surrogate(batch)
    value = (returns[:, 0].to(surrogate.dtype) + surrogate).unflatten(0, (-1, copies)).mean(1)
    info["generated"] = torch.tensor(generated)
    info["rollouts"] = torch.tensor(0 if branches is None else branches.row.shape[0])
    if reference is not None:
        info["kl"] = ratio.sum(-1).mean()
    return Estimate(value, tokens.view(shape), live.view(shape), rewards.view(shape[:-1]), branches, info)


def _logits(model: Model, prompts: Tensor, tokens: Tensor, mask: Tensor | None, max_rows: int) -> Tensor:
    """One pass with the graph; where the rows are more than max_rows, the graph of each part is computed on demand."""
    if tokens.shape[0] <= max_rows:
        return one_pass(model, prompts, tokens, mask)
    parts = zip(
        prompts.split(max_rows),
        tokens.split(max_rows),
        [None] * tokens.shape[0] if mask is None else mask.split(max_rows),
        strict=False,
    )
    return torch.cat([checkpoint(one_pass, model, *part, use_reentrant=False) for part in parts])  # pyright: ignore


def _from_here_on(x: Tensor) -> Tensor:
    """sum_{s >= t} x_s: [N, T] -> [N, T]."""
    return x.flip(-1).cumsum(-1).flip(-1)
