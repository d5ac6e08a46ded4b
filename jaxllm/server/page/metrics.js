// What /metrics says, in the text form of Prometheus, becomes the figures of this page.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const ANCHOR = "num_requests_running"; // every engine has it, so what stands before it is the prefix

/** Return the samples by name, each with its labels as they are written. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const [, name, labels = "", value] = LINE.exec(line) ?? [];
    if (!name) continue;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(value.replace("Inf", "Infinity")) });
  }
  return samples;
}

/** Return the figures of this moment; null for each that the server does not tell. */
export function read(text) {
  const samples = parse(text);
  const anchor = [...samples.keys()].find((name) => name.endsWith(ANCHOR)) ?? ANCHOR;
  const prefix = anchor.slice(0, -ANCHOR.length);
  const find = (name) => samples.get(prefix + name) ?? [];
  const sum = (name) => (find(name).length ? find(name).reduce((total, each) => total + each.value, 0) : null);
  const histogram = (name) => ({ sum: sum(`${name}_sum`), count: sum(`${name}_count`) });
  const size = /kv_cache_size_tokens="(\d+)"/.exec(find("cache_config_info")[0]?.labels);
  return {
    running: sum(ANCHOR),
    waiting: sum("num_requests_waiting"),
    kvUse: sum("kv_cache_usage_perc"),
    kvTokens: size && Number(size[1]),
    generated: sum("generation_tokens_total"),
    preemptions: sum("num_preemptions_total"),
    prefixQueries: sum("prefix_cache_queries_total"),
    prefixHits: sum("prefix_cache_hits_total"),
    isWarm: sum("engine_is_warm"),
    compiled: sum("programs_compiled_total"),
    ttft: histogram("time_to_first_token_seconds"),
    itl: histogram("inter_token_latency_seconds"),
  };
}

/** Return the means of the time between two readings; null where nothing happened, or the server began anew. */
export function between(before, after, seconds) {
  const generated = after.generated - before.generated;
  return {
    speed: after.generated === null || generated < 0 ? null : generated / seconds,
    ttft: mean(before.ttft, after.ttft),
    itl: mean(before.itl, after.itl),
  };
}

function mean(before, after) {
  const count = after.count - before.count;
  return count > 0 ? (after.sum - before.sum) / count : null;
}

/** Return a time in words. */
export function showSeconds(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${showNumber(seconds * 1000)} ms` : `${showNumber(seconds)} s`;
}

/** Return a number with about three digits. */
export function showNumber(value) {
  if (value === null) return "–";
  const digits = Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return value.toLocaleString("en", { maximumFractionDigits: Number.isInteger(value) ? 0 : digits });
}

/** Return a share in per cent. */
export function showShare(share) {
  return share === null ? "–" : `${showNumber(share * 100)} %`;
}
