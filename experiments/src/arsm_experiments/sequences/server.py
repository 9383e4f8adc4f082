"""A server for rollouts, as `arsm.sequences.Server` asks for it: `python -m
arsm_experiments.sequences.server`.

It keeps to the contract with the standard library's HTTP server and no cache of prefixes: a
reference to test against, and a way to sample in another process.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from torch import nn

from arsm.sequences import Decoding, Model, Prefixes, complete, live_tokens
from arsm_experiments.sequences.methods import Size, new_policy
from arsm_experiments.sequences.tasks import TASKS


class Sampler:
    """A model, and which version of the weights it has."""

    def __init__(self, model: Model, module: nn.Module, device: str = "cpu") -> None:
        self.model, self.module, self.device, self.version = model, module, device, ""

    def load(self, version: str, content: bytes) -> None:
        """Take new weights."""
        self.module.load_state_dict(
            torch.load(io.BytesIO(content), weights_only=True, map_location=self.device)
        )
        self.version = version

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Continuations of the request's prefixes."""
        prefixes, most = request["prefixes"], request["max_tokens"]
        generator = torch.Generator(self.device).manual_seed(request["seed"])
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, (prefix, wanted) in enumerate(zip(prefixes, most, strict=True)):
            alike[len(prefix), wanted].append(number)
        tokens: list[list[int]] = [[] for _ in prefixes]
        log_probs: list[list[float]] = [[] for _ in prefixes]
        for (_, wanted), numbers in sorted(alike.items()):
            prompts = torch.tensor([prefixes[number] for number in numbers], device=self.device)
            decoding = Decoding(wanted, request["eos"], request["temperature"])
            bare = Prefixes.bare(torch.arange(len(numbers), device=self.device), wanted)
            done = complete(self.model, prompts, None, bare, decoding, generator)
            ends = live_tokens(done.tokens, decoding.eos).sum(-1).tolist()
            rows = zip(numbers, ends, done.tokens.tolist(), done.log_probs.tolist(), strict=True)
            for number, end, row, scores in rows:
                tokens[number], log_probs[number] = row[:end], scores[:end]
        return {"tokens": tokens, "log_probs": log_probs}


def make_server(sampler: Sampler, host: str = "127.0.0.1", port: int = 0) -> HTTPServer:
    """A server that answers one request after the other; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            try:
                sampler.load(self.path.removeprefix("/weights/"), self._body())
            except Exception as error:  # whatever the weights are, the server goes on
                return self._answer(400, str(error).encode())
            return self._answer(200, b"")

        def do_POST(self) -> None:
            try:
                request = json.loads(self._body())
                if request["version"] != sampler.version:
                    return self._answer(409, b"")
                answer = sampler.complete(request)
            except Exception as error:
                return self._answer(400, repr(error).encode())
            return self._answer(200, json.dumps(answer).encode())

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return HTTPServer((host, port), Handler)


def main() -> None:
    """Serve the policy of `arsm sequences`, whose options --task, --width, --layers and --heads
    must be the same.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--task", choices=list(TASKS), default="digit_sorting")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--host", default="127.0.0.1", help="Where to listen; the server trusts whoever reaches it"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one")
    options = parser.parse_args()
    policy = new_policy(
        options.task, Size(options.width, options.layers, options.heads), options.device
    )
    server = make_server(Sampler(policy, policy, options.device), options.host, options.port)
    print(f"Serving at http://{options.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
