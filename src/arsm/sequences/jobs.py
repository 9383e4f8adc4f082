"""The jobs of slots: what sampling and completing ask them to play."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.sequences.ahead import Ahead
from arsm.sequences.board import Playing, Rows, Starts
from arsm.sequences.decode import Completions, Decoding, Prefixes
from arsm.sequences.draws import Noise, Sampled
from arsm.sequences.ends import is_end


@dataclass(frozen=True, eq=False)
class DecodingJob:
    """Starts to play to the end."""

    known: Tensor
    """[N, prompt + ...]: the sequences that they branch off."""
    mask: Tensor | None
    """[N, prompt] bool."""
    prompt: int
    """Columns of the prompts."""
    true: Playing
    """The sequences asked for; branches that begin ahead are numbered after them."""
    decoding: Decoding
    draws: int
    """Draws per state."""
    generator: torch.Generator | None
    noise: Noise | None
    ahead: Ahead | None = None
    """Takes branches that are played beside it; None where it has none."""

    @property
    def playing(self) -> list[Playing]:
        """All that rows may play."""
        return [self.true] if self.ahead is None else [self.true, self.ahead]

    def draw_noise(self, rows: Rows) -> None:
        """The uniform numbers of one step."""
        if self.noise is None:
            rows.uniform.uniform_(generator=self.generator)
            return
        names = torch.cat([each.starts.name for each in self.playing])
        # rows without an owner draw too, and nobody reads it
        rows.uniform.copy_(self.noise(names[rows.owner.clamp_min(0)], rows.index + 1))


def sampling(
    prompts: Tensor,
    mask: Tensor | None,
    row: Tensor,
    decoding: Decoding,
    draws: int,
    generator: torch.Generator | None,
    noise: Noise | None,
) -> DecodingJob:
    """Sample one sequence per entry of `row`."""
    done = Sampled.empty(row.shape[0], decoding.max_tokens, draws, decoding.eos, prompts.device)
    name = torch.arange(row.shape[0], device=row.device)
    starts = Starts(row, torch.full_like(row, -1), prompts[row, -1], name)
    return DecodingJob(
        known=prompts,
        mask=mask,
        prompt=prompts.shape[1],
        true=Playing(starts, done, 0),
        decoding=decoding,
        draws=draws,
        generator=generator,
        noise=noise,
    )


def completing(
    prompts: Tensor,
    mask: Tensor | None,
    prefixes: Prefixes,
    decoding: Decoding,
    generator: torch.Generator | None,
    noise: Noise | None,
) -> tuple[DecodingJob, Completions]:
    """Complete every prefix. A start is named by its prefix; the completions hold what is
    known already, which is all of those that have no start.
    """
    completions = Completions.empty(prefixes, decoding)
    given = prefixes.action >= 0
    completions.tokens[given, prefixes.step[given]] = prefixes.action[given]
    # a row feeds one token and draws the next: the action where one is given, else the token
    # before it, which may be the prompt's last
    index = torch.where(given, prefixes.step, prefixes.step - 1)
    before = torch.cat([prompts[:, -1:], prefixes.known], -1)[prefixes.row, prefixes.step]
    token = torch.where(given, prefixes.action, before)

    over = _over_at_once(prefixes, index, completions, decoding)
    going = (~over).nonzero().squeeze(-1)
    starts = Starts(prefixes.row[going], index[going], token[going], going)
    done = Sampled(
        completions.tokens[going].unsqueeze(-1),
        completions.log_probs[going].unsqueeze(-1),
        torch.zeros_like(completions.log_probs[going]),
    )
    job = DecodingJob(
        known=torch.cat([prompts, prefixes.known.to(prompts)], -1),
        mask=mask,
        prompt=prompts.shape[1],
        true=Playing(starts, done, 0),
        decoding=decoding,
        draws=1,
        generator=generator,
        noise=noise,
    )
    return job, completions


def _over_at_once(
    prefixes: Prefixes, index: Tensor, completions: Completions, decoding: Decoding
) -> Tensor:
    """[R] bool: the prefixes that need no forward, as their last token `index` [R] ends
    its sequence.
    """
    given = prefixes.action >= 0
    over = (index == decoding.max_tokens - 1) | (given & is_end(prefixes.action, decoding.eos))
    if decoding.stop is not None:
        # one after the other: a user's function reads one sequence
        for one in (given & ~over).nonzero().squeeze(-1).tolist():
            length = int(prefixes.step[one]) + 1
            over[one] = decoding.stopped(completions.tokens[one : one + 1], length)[0]
    return over
