"""Separate prefill and decode servers (disaggregated serving: arXiv 2401.09670).

A server of the first pool processes a prompt and sends its cache to a server of the second pool, which
generates the answer. Servers of both pools take their steps in order of time.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from math import inf

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.graph.progress import Progress
from hespas.simulator.serving.engine import SHOWN_EVERY, RequestState, ServerPool, ServerRun
from hespas.simulator.serving.requests import Requests, ServingRun, StepLog

__all__ = ["serve_disaggregated"]

_NEW = -1
"""Event of the next request that arrives."""


def serve_disaggregated(
    requests: Requests,
    prefill: ServerPool,
    decode: ServerPool,
    send_ns: FloatArray,
    *,
    progress: Progress | None = None,
) -> ServingRun:
    """Simulate separate prefill and decode servers, and return the times of all requests.

    A request goes to the replica with the fewest unfinished requests, in both pools. ``send_ns`` is the time
    to send the cache of each prompt, shape ``(requests,)``. A replica sends one cache after the other, while
    it processes other prompts. The first token reaches the client when a decode server starts to decode,
    because it is that server that answers the client. An answer of one token needs no such server. Arguments
    and errors are otherwise as in :func:`serve`.
    """
    return _DisaggregatedRun(requests, prefill, decode, send_ns).run(progress)


class _DisaggregatedRun:
    """State of prefill servers and decode servers while they run. The server whose next step starts
    first takes it, so that all requests that arrive before are known.
    """

    def __init__(
        self, requests: Requests, prefill: ServerPool, decode: ServerPool, send_ns: FloatArray
    ) -> None:
        count, state = len(requests), RequestState(requests)
        prompts = replace(requests, output=np.ones(count, np.int64), concurrency=0)
        answers = replace(requests, concurrency=0)
        # the request's time outside of steps counts once, and a decode server only repeats prompts
        steps = decode.steps.corrected(replace(decode.steps.correction, request_ns=0.0))
        decode = decode._replace(steps=steps, policy=replace(decode.policy, chunked=True))
        self.requests, self.state, self.send_ns = requests, state, send_ns
        self.arrival, received_ns = np.full(count, inf), np.full(count, inf)
        # more replicas than requests would stay idle
        first, second = (range(min(pool.replicas, count)) for pool in (prefill, decode))
        self.prefill = [ServerRun(prompts, prefill, state, self.arrival) for _ in first]
        self.decode = [ServerRun(answers, decode, state, received_ns) for _ in second]
        self.sent_ns = [0.0] * len(self.prefill)
        """Time at which each prefill server has sent its latest cache."""
        self.coming = self.received = 0
        """The next request to arrive, and the number of caches that have arrived."""
        num_first = min(requests.concurrency, count) or min(count, 1)
        times_ns = [0.0] * num_first if requests.concurrency else requests.arrival_ns[:num_first].tolist()
        self.events = [(time_ns, order, _NEW) for order, time_ns in enumerate(times_ns)]
        """Heap of arrivals: the time, a number that orders equal times, and the request whose cache arrives
        at a decode server.
        """
        self.num_events = num_first

    def run(self, progress: Progress | None = None) -> ServingRun:
        """Simulate all steps of all servers."""
        requests, servers, first = self.requests, [*self.prefill, *self.decode], len(self.prefill)
        shown = finished = 0
        clocks = [server.clock for server in servers]
        while True:
            event_ns = self.events[0][0] if self.events else inf
            index = min(range(len(servers)), key=clocks.__getitem__)
            if event_ns < inf and event_ns <= clocks[index]:
                index = self._arrive(heappop(self.events))
                clocks[index] = servers[index].clock
                continue
            if clocks[index] == inf:
                break
            server = servers[index]
            before, bounds = len(server.done), [event_ns, *clocks[:first]]
            if index >= first and requests.concurrency:  # answers that finish bring the next requests
                bounds += [other.next_finish for other in self.decode if other is not server]
            server.advance(min(bounds))
            clocks[index] = server.clock
            for request in server.done[before:]:
                if index < first and requests.output[request] > 1:
                    start_ns = max(server.now, self.sent_ns[index])
                    self.sent_ns[index] = start_ns + float(self.send_ns[request])
                    self._expect(self.sent_ns[index], request)
                    continue
                finished += 1
                if requests.concurrency:
                    self._expect(server.now, _NEW)
            if progress and finished >= shown:
                progress(finished, len(requests))
                shown = finished + SHOWN_EVERY
        state = self.state
        return ServingRun(
            requests=requests,
            arrival_ns=self.arrival,
            scheduled_ns=state.scheduled,
            first_token_ns=state.first,
            last_token_ns=state.last,
            preemptions=state.preemptions,
            steps=StepLog.joined(server.log for server in self.decode),
            prefill_steps=StepLog.joined(server.log for server in self.prefill),
            bound_by=frozenset[str]().union(*(server.bound_by for server in servers)),
            peak_pages=max(server.peak_pages for server in servers),
        )

    def _expect(self, time_ns: float, request: int) -> None:
        """Add an arrival: of the cache of a request, or of a new request."""
        self.num_events += 1
        heappush(self.events, (time_ns, self.num_events, request))

    def _arrive(self, event: tuple[float, int, int]) -> int:
        """Give a request to the server with the fewest unfinished requests; equal servers take turns. Return
        the number of the server.
        """
        time_ns, _, request = event
        servers, turn, start = self.prefill, self.coming, 0
        if request != _NEW:
            servers, turn, start = self.decode, self.received, len(self.prefill)
            self.received += 1
        elif self.coming == len(self.requests):
            return 0
        else:
            request = self.coming
            self.coming += 1
            if not self.requests.concurrency and self.coming < len(self.requests):
                self._expect(float(self.requests.arrival_ns[self.coming]), _NEW)
        order = ((turn + offset) % len(servers) for offset in range(len(servers)))
        chosen = min(order, key=lambda number: servers[number].load)
        servers[chosen].accept(request, time_ns)
        return start + chosen
