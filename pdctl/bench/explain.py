"""The benchmark's definitions in words: `pdctl bench --explain` prints, docs/bench.md quotes."""

TEXT = """\
What pdctl bench measures

Clocks. Every time is taken on one clock: the client's, or one host's. Timestamps of two
hosts are never subtracted; times that a host measured travel with the answer as durations.

Requests
  attempted     sent, whatever became of them
  successful    HTTP 200, at least one piece of output, a finish reason and [DONE], and no
                error event
  failed        everything else: refused connections, HTTP errors, error events inside the
                stream, streams cut short, empty answers, time-outs. Any failure makes the
                exit code 1. Failed requests are in no metric but the failed count and the
                denominator of goodput
  duration      first request sent to last answer complete; the warm-up is before it
  input tokens  as the server's usage counts them, successful requests only. Cached: of these,
                tokens whose KV came from a prefix cache. The same --seed again sends the same
                prompts and hits it
  throughput    successful requests, output tokens, and input plus output tokens, each over
                the duration

Metrics (successful requests)
  Decode   1 / TPOT: tokens per second of one stream. Low is bad: its percentiles count from
           the slow end, and P99 is the speed that 99 % of the requests exceed. With
           --output-len 2 it is one gap, the hand-over and one decode step: not decoding
  TTFT     request sent to first output: the first chunk with tokens, from an endpoint that
           tells (ours do), else with text. One that only opens the answer does not count
  S_TTFT   the same as the server saw it: request received by the instance that answers, to
           first token
  TPOT     (last output - first output) / (output tokens - 1)
  ITL      gaps between arrivals of output. What arrives in one network read is one arrival.
           When arrivals hold several tokens a note below the table says so, and TPOT is the
           better number
  E2E      request sent to end of the stream

  Percentiles are linear between samples. With n samples nothing beyond P(100 - 100/n) is more
  than the single worst sample; a note says so. "-": no samples. It is never written as 0.

Parts of the TTFT (requests whose answers say their stages)
  admit          router and instance: checking the request, tokenizing
  route          router: choosing the instances
  reserve        decode: waiting for room in its CPU buffer
  prefill_queue  prefill: waiting for its turn
  prefill        prefill: computing the prompt, first token included
  stream         the rest: network, detokenizing, this client

Hand-over (requests that moved KV)
  transfer       end of the prompt's computation to the last byte put: what moving costs
                 beyond computing. Blocks move while later ones compute, so most bytes have
                 moved before it starts
  swap_in        from the CPU buffer to the device
  second token   gap between first and second output: the hand-over and one decode step
  KV             bytes moved, by path
  exposed rate   KV bytes / transfer. It can exceed what the path can do, for the reason above

Load
  --request-rate R    open loop: gaps are drawn from a gamma distribution of shape
                      --burstiness (1: Poisson), and sending does not wait for answers. The
                      report has asked and achieved rate, and how late this client was
  --request-rate inf  all at once, or as many at a time as --max-concurrency
  --max-concurrency   holds back an open loop too; the wait is lateness then, not TTFT
  --goodput           requests that met every limit over requests attempted, so refusing work
                      does not help. An answer of one token has no TPOT and meets its limit
"""
