"""Rollouts elsewhere: an engine takes prefixes and returns continuations, sampled with
the weights of a module.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from arsm.sequences.decode import Completions, Decoding, Prefixes, complete
from arsm.sequences.ends import Ends, all_ends, is_end
from arsm.sequences.model import Model


class EngineFailure(RuntimeError):
    """An engine died or broke the contract. Nothing was changed: call `estimate` again
    when it is back.
    """


class Engine(Protocol):
    """A sampler that completes prefixes for `estimate`."""

    def complete(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        prefixes: Prefixes,
        decoding: Decoding,
        generator: torch.Generator | None = None,
    ) -> Completions:
        """Complete every prefix, like `arsm.sequences.complete`, with the weights as they
        are now; raises `EngineFailure`.
        """
        ...


# ---------------------------------------------------------------- parts that can be played anywhere


@dataclass(frozen=True, eq=False)
class Part:
    """Some prefixes with their prompts and a seed: who plays it, and beside which
    others, changes nothing.
    """

    place: Tensor
    """[r]: which of all prefixes."""
    prompts: Tensor
    mask: Tensor | None
    prefixes: Prefixes
    decoding: Decoding
    seed: int

    def play(self, model: Model) -> Completions:
        """Complete it with this model."""
        generator = torch.Generator(self.prompts.device).manual_seed(self.seed)
        return complete(model, self.prompts, self.mask, self.prefixes, self.decoding, generator)

    def texts(self, which: Tensor, length: Tensor, tokens: Tensor) -> list[list[int]]:
        """The prompts of some prefixes [n], without padding, and the first `length` [r] of their
        tokens [r, T].
        """
        found = []
        for row in which.tolist():
            prompt = self.prompts[self.prefixes.row[row]]
            if self.mask is not None:
                prompt = prompt[self.mask[self.prefixes.row[row]]]
            found.append([*prompt.tolist(), *tokens[row, : int(length[row])].tolist()])
        return found

    def to(self, device: torch.device | str) -> Part:
        """A copy on another device."""
        prefixes = Prefixes(*(x.to(device) for x in vars(self.prefixes).values()))
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, prompts=self.prompts.to(device), mask=mask, prefixes=prefixes)


def split(
    prompts: Tensor,
    mask: Tensor | None,
    prefixes: Prefixes,
    decoding: Decoding,
    rows: int,
    generator: torch.Generator | None,
) -> list[Part]:
    """Parts of at most `rows` prefixes, those of one prompt together, each with a seed
    from the generator.
    """
    # branches of one prompt share their beginning: an engine with a cache of prefixes reads it once
    places = prefixes.row.argsort(stable=True).split(rows)
    device = prompts.device if generator is None else generator.device
    # drawn here, so that a part that is played again, elsewhere, gives the same tokens
    seeds = torch.randint(2**63 - 1, (len(places),), generator=generator, device=device).tolist()
    parts = []
    for place, seed in zip(places, seeds, strict=True):
        # the part's own prompts and no others travel with it
        used, row = prefixes.row[place].unique(return_inverse=True)
        some = Prefixes(row, prefixes.step[place], prefixes.action[place], prefixes.known[used])
        parts.append(
            Part(place, prompts[used], None if mask is None else mask[used], some, decoding, seed)
        )
    return parts


def gather(
    parts: list[Part], played: list[Completions], like: Prefixes, decoding: Decoding
) -> Completions:
    """The parts' completions in the order of the prefixes that they were split from."""
    whole = Completions.empty(like, decoding)
    for part, done in zip(parts, played, strict=True):
        whole.tokens[part.place] = done.tokens.to(whole.tokens)
        whole.log_probs[part.place] = done.log_probs.to(whole.log_probs)
    return whole


# ---------------------------------------------------------------- weights

AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By the bytes of a type; wider types are read as int64."""


def weights_version(module: nn.Module) -> str:
    """A digest of the module's weights, from the sums of their bits: reads them once,
    as sampling one token does.
    """
    state = module.state_dict()
    # sums of bits and not of values: NaN and rounding cannot hide a change
    bits = [x.detach().flatten().contiguous() for x in state.values()]
    sums = [
        x.view(AS_INTEGERS.get(x.dtype.itemsize, torch.int64)).sum(dtype=torch.int64) for x in bits
    ]
    sums = torch.stack([x.to(sums[0].device) for x in sums]).tolist() if sums else []
    words = json.dumps([list(state), sums])
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------- an external server


class Server:
    """An `Engine` on a server that speaks HTTP, such as an inference engine with a
    cache of prefixes.

    The contract, in JSON:

    | request | body | answer |
    |---|---|---|
    | `PUT /weights/VERSION` | `torch.save` of the module's `state_dict` | any, with status 200 |
    | `POST /complete` | the fields of a request, below | `tokens`, `log_probs` |

    A request has `version`, `prefixes`, `max_tokens`, `eos`, `temperature` and `seed`.
    `prefixes` holds R lists of tokens, without padding, and `max_tokens` R numbers.
    `tokens` has R continuations, each drawn from softmax(logits / temperature) without
    top-k, top-p or penalties: its number of tokens, or fewer that end with `eos` (one
    of them, where it is a list). `log_probs` holds ln p of each of these tokens under
    that distribution. A server that has another version of the weights than the request
    names answers with status 409; the weights are then sent. With `seed`, a server can
    make runs repeatable.
    """

    def __init__(self, url: str, module: nn.Module, *, patience: float = 600.0) -> None:
        """
        Args:
            url: such as http://localhost:8000.
            module: whose weights the server samples with. They are sent when they have
                changed.
            patience: seconds to wait for an answer.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f'"{url}" is no address of a server; write http://HOST:PORT.')
        self.url = url.rstrip("/")
        self.module = module
        self.patience = patience

    def complete(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        prefixes: Prefixes,
        decoding: Decoding,
        generator: torch.Generator | None = None,
    ) -> Completions:
        """Complete every prefix, like `arsm.sequences.complete`."""
        version = weights_version(self.module)
        parts = split(prompts, mask, prefixes, decoding, decoding.rows, generator)
        return gather(
            parts, [self._play(part.to("cpu"), version) for part in parts], prefixes, decoding
        )

    def _play(self, part: Part, version: str) -> Completions:
        decoding = part.decoding
        prefixes = part.prefixes
        done = Completions.empty(prefixes, decoding)
        # a given action is text to the server, like the tokens before it
        given = prefixes.action >= 0
        length = prefixes.step + given.long()
        done.tokens[given, prefixes.step[given]] = prefixes.action[given]

        over = given & is_end(prefixes.action, decoding.eos)
        going = (~over & (length < decoding.max_tokens)).nonzero().squeeze(-1)
        if not going.shape[0]:
            return done
        starts = length[going].tolist()
        wanted = [decoding.max_tokens - start for start in starts]
        request = {
            "version": version,
            "prefixes": part.texts(going, length, done.tokens),
            "max_tokens": wanted,
            "eos": list(decoding.eos) if isinstance(decoding.eos, tuple) else decoding.eos,
            "temperature": decoding.temperature,
            "seed": part.seed,
        }
        found = self._checked(self._ask(request), wanted, decoding.eos)
        for row, start, tokens, log_probs in zip(going.tolist(), starts, *found, strict=True):
            drawn = slice(start, start + len(tokens))
            done.tokens[row, drawn] = torch.tensor(tokens)
            done.log_probs[row, drawn] = torch.tensor(log_probs, dtype=torch.float64)
        return done

    def _ask(self, request: dict[str, Any]) -> Any:
        body = json.dumps(request).encode()
        status, answer = self._send("POST", "/complete", body)
        if status == 409:  # new weights, or a server that was started anew
            self._send_weights(request["version"])
            status, answer = self._send("POST", "/complete", body)
        if status == 409:
            self._fail(
                "has other weights again right after it was sent these; give each training a "
                "server of its own"
            )
        if status != 200:
            self._fail(
                f"answered /complete with status {status}: "
                f"{answer[:200].decode(errors='replace')!r}"
            )
        try:
            return json.loads(answer)
        except ValueError:
            self._fail("did not answer /complete with JSON")

    def _send_weights(self, version: str) -> None:
        whole = io.BytesIO()
        torch.save({name: x.cpu() for name, x in self.module.state_dict().items()}, whole)
        status, answer = self._send("PUT", f"/weights/{version}", whole.getvalue())
        if status != 200:
            self._fail(
                f"refused the weights with status {status}: "
                f"{answer[:200].decode(errors='replace')!r}"
            )

    def _send(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        # a connection per request: a server that was started anew is simply asked again
        connection = kind(parts.hostname or "", parts.port, timeout=self.patience)
        try:
            connection.request(method, parts.path + path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise EngineFailure(
                f"The engine at {self.url} does not answer ({reason}); start it again and go on: "
                "nothing was changed."
            ) from error
        finally:
            connection.close()

    def _checked(
        self, answer: Any, wanted: list[int], eos: Ends
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities that keep the contract."""
        try:
            tokens = [[int(x) for x in row] for row in answer["tokens"]]
            log_probs = [[float(x) for x in row] for row in answer["log_probs"]]
        except (KeyError, TypeError, ValueError):
            self._fail("must answer with `tokens` and `log_probs`, two lists of lists of numbers")
        if len(tokens) != len(wanted) or [len(row) for row in tokens] != [
            len(row) for row in log_probs
        ]:
            self._fail(
                f"must answer {len(wanted)} prefixes with as many continuations and a "
                f"log-probability per token, but answered with {len(tokens)} and {len(log_probs)}"
            )
        for row, most, scores in zip(tokens, wanted, log_probs, strict=True):
            self._check_continuation(row, most, scores, eos)
        return tokens, log_probs

    def _check_continuation(
        self, row: list[int], most: int, scores: list[float], eos: Ends
    ) -> None:
        """Require tokens to the end of sequence or `most` of them, with probabilities."""
        ends = all_ends(eos)
        # a continuation that stops early would be taken for one that has ended
        end = next((place + 1 for place, token in enumerate(row) if token in ends), most)
        if end != len(row):
            self._fail(
                f"must continue a prefix to its end of sequence or by {most} tokens, but sent {row}"
            )
        if min(row) < 0 or not all(-math.inf < score <= 1e-3 for score in scores):
            self._fail(
                f"must send tokens from 0 on and finite log-probabilities, but sent {row} and "
                f"{scores}"
            )

    def _fail(self, what: str) -> NoReturn:
        raise EngineFailure(f"The engine at {self.url} {what}.")
