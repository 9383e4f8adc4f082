"""The contract of a server for rollouts, against one in a process of its own; and answers that
break it.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch

import arsm
from arsm import sequences
from arsm.sequences import Branch, EngineFailure, Server
from arsm_experiments.sequences.methods import Size, new_policy
from arsm_experiments.sequences.server import Sampler, make_server
from arsm_experiments.sequences.tasks import EOS, TASKS, VOCABULARY
from arsm_experiments.sequences.transformer import Transformer

SIZE = Size(width=16, layers=1, heads=2)
SHAPE = ["--width", "16", "--layers", "1", "--heads", "2"]
WIDTH = TASKS["digit_sorting"].answer_tokens


@contextlib.contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server as a user starts it, and its address."""
    words = [sys.executable, "-m", "arsm_experiments.sequences.server", *SHAPE, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        try:
            yield process, found[0]
        finally:
            process.kill()


def policy() -> Transformer:
    torch.manual_seed(0)
    model = new_policy("digit_sorting", SIZE, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def estimate(
    model: Transformer, engine: sequences.Engine | None, rows: int = 8
) -> sequences.SequenceEstimate:
    return sequences.estimate(
        Branch(arsm.RLOO(3)),
        model,
        torch.arange(2, 9).expand(rows, 7),
        lambda prompts, tokens: (tokens % 3 == 1).double().mean(-1),
        max_tokens=WIDTH,
        eos=EOS,
        engine=engine,
        rows=13,
        generator=torch.Generator().manual_seed(0),
    )


def test_a_server_process_keeps_the_contract_and_may_die() -> None:
    model = policy()
    with serving() as (process, address):
        engine = Server(address, model)
        for _ in range(2):  # the second time with new weights
            out = estimate(model, engine)
            assert float(out.info["mismatch"]) < 1e-5
            again = estimate(model, engine)
            assert torch.equal(out.tokens, again.tokens)
            assert out.branches is not None
            branches = out.branches
            kept = torch.arange(WIDTH) < branches.step.unsqueeze(-1)
            assert torch.equal(branches.tokens[kept], out.tokens[branches.row][kept])
            assert torch.equal(
                branches.tokens[torch.arange(len(kept)), branches.step], branches.action
            )
            assert int(out.info["generated"]) > int(out.mask.sum())
            (-out.value.mean()).backward()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        expected = estimate(model, engine)
        process.kill()
        process.wait()
        with pytest.raises(
            EngineFailure,
            match=r"does not answer .*start it again and go on: nothing was changed\.$",
        ):
            estimate(model, engine)
    port = int(address.rpartition(":")[2])
    # which has not seen the last weights
    with running(make_server(Sampler(served := policy(), served), port=port)):
        assert torch.equal(estimate(model, engine).tokens, expected.tokens)


@contextlib.contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_samples_have_the_models_distribution() -> None:
    """Frequencies of the first token, drawn by the server and within five standard errors of p."""
    model = policy()
    with running(make_server(Sampler(served := policy(), served))) as address:
        rows = 4000
        prompts, how = torch.arange(2, 9).expand(rows, 7), sequences.Decoding(1, None, 0.8, rows)
        bare = sequences.Prefixes.bare(torch.arange(rows), 1)
        generator = torch.Generator().manual_seed(0)
        tokens = (
            Server(address, model).complete(prompts, None, bare, how, generator).tokens.squeeze(-1)
        )
    p = (model.start(prompts[:1]).logits.detach().squeeze(0) / 0.8).softmax(-1)
    seen = torch.bincount(tokens, minlength=VOCABULARY) / rows
    assert ((seen - p).abs() < 5 * (p * (1 - p) / rows).sqrt() + 1e-3).all()
    # what another temperature would give
    assert (seen - p.square() / p.square().sum()).abs().max() > 0.02


def test_several_ends() -> None:
    model, ends = policy(), (EOS, 3)
    with running(make_server(Sampler(served := policy(), served))) as address:
        rows = 60
        prompts, how = torch.arange(2, 9).expand(rows, 7), sequences.Decoding(WIDTH, ends)
        bare = sequences.Prefixes.bare(torch.arange(rows), WIDTH)
        tokens = (
            Server(address, model)
            .complete(prompts, None, bare, how, torch.Generator().manual_seed(0))
            .tokens
        )
    live = sequences.live_tokens(tokens, ends)
    last = tokens[torch.arange(rows), live.sum(-1) - 1]
    assert bool((last == 3).any())
    assert bool((tokens[~live] == EOS).all())
    assert int((tokens[live] == 3).sum()) == int((last == 3).sum())


def answering(status: int, answer: object) -> HTTPServer:
    """A server that has only one answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status if self.command == "POST" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return HTTPServer(("127.0.0.1", 0), Handler)


ONE = [2] * WIDTH


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (500, b"out of memory", "answered /complete with status 500: 'out of memory'"),
        (409, b"", "has other weights again right after it was sent these"),
        (200, b"<html>", "did not answer /complete with JSON"),
        (200, {"text": ["a"]}, "must answer with `tokens` and `log_probs`"),
        (
            200,
            {"tokens": [], "log_probs": []},
            "1 prefixes with as many continuations .* answered with 0 and 0",
        ),
        (200, {"tokens": [ONE], "log_probs": [[0.0]]}, "a log-probability per token"),
        (
            200,
            {"tokens": [[2, 2]], "log_probs": [[0.0, 0.0]]},
            "end of sequence or by 7 tokens, but sent",
        ),
        (
            200,
            {"tokens": [[EOS, *ONE[1:]]], "log_probs": [[0.0] * WIDTH]},
            "to its end of sequence",
        ),
        (200, {"tokens": [[-1, *ONE[1:]]], "log_probs": [[0.0] * WIDTH]}, "tokens from 0 on"),
        (
            200,
            {"tokens": [ONE], "log_probs": [[float("-inf")] * WIDTH]},
            "finite log-probabilities",
        ),
        (200, {"tokens": [ONE], "log_probs": [[0.5] * WIDTH]}, "finite log-probabilities"),
    ],
    ids=[
        "status",
        "weights",
        "html",
        "keys",
        "none",
        "scores",
        "short",
        "goes on",
        "token",
        "infinite",
        "density",
    ],
)
def test_answers_that_break_the_contract(status: int, answer: object, message: str) -> None:
    model = policy()
    with (
        running(answering(status, answer)) as address,
        pytest.raises(EngineFailure, match=message) as raised,
    ):
        estimate(model, Server(address, model), rows=1)
    assert str(raised.value).startswith(f"The engine at {address} ")
    assert "\n" not in str(raised.value)


def test_wrong_requests_do_not_end_the_server() -> None:
    model = policy()
    wider = new_policy("digit_sorting", Size(width=32, layers=1, heads=2), "cpu")
    with running(make_server(Sampler(served := policy(), served))) as address:
        with pytest.raises(EngineFailure, match="refused the weights with status 400"):
            estimate(wider, Server(address, wider))
        assert estimate(model, Server(address, model)).tokens.shape == (8, WIDTH)
