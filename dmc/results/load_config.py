"""Settings of a load test, and what its kinds share."""

from __future__ import annotations

import statistics
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, StrictFloat, StrictInt

from dmc.settings import Count, Positive, checked_dataclass


@checked_dataclass(frozen=True)
class LoadConfig:
    """Settings of a load test.

    Raises:
        ValueError: a value is out of range.
    """

    server: str
    """Address of the server, with or without /v1."""
    model: str | None = None
    """Name of the model on the server; None: its first, and all of them for a crowd."""
    rates: Annotated[list[Positive | None], Field(min_length=1)] = field(default_factory=lambda: [None])
    """Rates of requests per second, as a Poisson process; None: all at once, up to `concurrency`."""
    num_requests: Count = 64
    """Number of requests at each rate."""
    concurrency: Count = 256
    """Maximum number of concurrent requests."""
    prompt_tokens: tuple[Count, Count] = (64, 256)
    """Minimum and maximum tokens of a prompt, all lengths equally likely."""
    new_tokens: tuple[Count, Count] = (32, 128)
    vocab_size: Count = 1000
    """Prompts are tokens below it."""
    first_seconds: StrictFloat = 2.0
    """A request is in time if its first token takes at most this many seconds, and the others on average at most:"""
    token_seconds: StrictFloat = 0.2
    api_key: str = "none"
    fields: dict[str, Any] = field(default_factory=lambda: {"temperature": 0, "ignore_eos": True})
    """Further fields of a request's body; `ignore_eos` is an extension of this server and vLLM."""
    seed: StrictInt = 0
    crowd_seconds: Positive | None = None
    """`concurrency` clients that also break off, drop and send nonsense, for so long; None: requests at `rates`."""
    output: str = "outputs/load"

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens"):
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name}={[least, most]}: expected the least and the most")
        if not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server={self.server}: expected an address such as http://127.0.0.1:8000")

    @property
    def root(self) -> str:
        """Return the address without /v1."""
        return self.server.rstrip("/").removesuffix("/v1")


def headers_of(config: LoadConfig) -> dict[str, str]:
    """Write the key as servers read it."""
    return {"Authorization": f"Bearer {config.api_key}"}


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else sum(values)
