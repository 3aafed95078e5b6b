// The live state: follows its stream, applies changes, and estimates the server's clock.

import { sentence } from "./words.js";

const SILENCE_S = 40; // the server sends something every 15 s
const SHOWN = 48; // ended jobs in the live state
const PAUSES_S = [0.5, 1, 2, 4, 8];

/** Parse JSON from the server; a seed may have more digits than a JavaScript number holds. */
export const parse = (text) => JSON.parse(text.replace(/"seed":\s*(\d{16,})/g, '"seed":"$1"'));

const byEnd = (a, b) => b.completed_at - a.completed_at;

class Problem extends Error {
  constructor(status, body, retryAfter) {
    super(body?.message || (status ? `the server responded with status ${status}` : "the server cannot be reached"));
    this.status = status;
    this.param = body?.param ?? null;
    this.retryAfter = retryAfter;
  }
}

/** A path of the server relative to the page, which may lie below a proxy's prefix. */
export const at = (path) => (path ?? "").replace(/^\//, "");

/** The response to a request; throws a Problem with the error and its field. */
export async function ask(method, path, { json, form, key, signal } = {}) {
  const headers = {};
  if (json !== undefined) headers["Content-Type"] = "application/json";
  if (key) headers["Idempotency-Key"] = key;
  let response;
  try {
    response = await fetch(at(path), { method, headers, signal, body: form ?? (json && JSON.stringify(json)) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, null, null);
  }
  if (response.ok) return response;
  let body = null;
  try {
    body = parse(await response.text()).error;
  } catch {
    // not the server's format: a proxy responded
  }
  throw new Problem(response.status, body, Number(response.headers.get("Retry-After")) || null);
}

/** Yields [event, data] of a stream of server-sent events; calls `alive` for any data. */
async function* events(response, alive) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
      const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length) yield [name, data.join("\n")];
    }
  }
}

/** Fires "change" when the state changes and "connection" when the connection does. */
export class Live extends EventTarget {
  state = null;
  open = new Map(); // jobs by id, in order
  finished = []; // the last 48 that have ended, latest first
  older = []; // ended jobs before these, as far as they were asked for
  favourites = []; // favourites that were asked for
  hasOlder = { all: false, favourites: true };
  #after = { all: null, favourites: null }; // the last jobs of the pages so far
  #ended = null; // `ended`, until it changes
  timeline = new Map(); // bars by key
  connection = { kind: "connecting", reason: "", when: "" }; // connecting, live, lost, locked
  #ahead = -Infinity; // server's clock minus performance.now(), in seconds
  #stoppedAt = null; // the time shown while the connection is lost
  #wake = null;
  #request = null;

  /** Unix seconds by the server's clock, estimated. */
  now() {
    if (this.#stoppedAt !== null) return this.#stoppedAt;
    return this.state ? performance.now() / 1000 + this.#ahead : Date.now() / 1000;
  }

  job(id) {
    return this.open.get(id) ?? this.ended.find((job) => job.id === id) ?? this.favourites.find((job) => job.id === id);
  }

  /** All known jobs that have ended, latest first. */
  get ended() {
    if (this.#ended) return this.#ended;
    const known = new Set(this.finished.map((job) => job.id));
    return (this.#ended = [...this.finished, ...this.older.filter((job) => !known.has(job.id))]);
  }

  /** Ended jobs of a kind: "all" or "favourites". */
  shown(kind) {
    if (kind === "all") return this.ended;
    const news = new Map([...this.favourites, ...this.ended].map((job) => [job.id, job]));
    return [...news.values()].filter((job) => job.favourite).sort(byEnd);
  }

  /** Ask for jobs that ended earlier; pages are in the order of acceptance. */
  async more(kind = "all") {
    const known = new Set((kind === "all" ? this.ended : this.favourites).map((job) => job.id));
    let news = [];
    while (this.hasOlder[kind] && !news.length) {
      const after = this.#after[kind] ? `&after=${encodeURIComponent(this.#after[kind])}` : "";
      const which = kind === "all" ? "" : "&favourite=true";
      const page = parse(await (await ask("GET", `/v1/jobs?ended=true&limit=100${which}${after}`)).text());
      this.#after[kind] = page.last_id;
      this.hasOlder[kind] = page.has_more;
      news = page.data.filter((job) => !known.has(job.id));
    }
    if (kind === "all") this.older = [...this.older, ...news].sort(byEnd);
    else this.favourites = [...this.favourites, ...news];
    this.#changed();
  }

  /** Mark a result, which the server keeps, or end that. */
  async favour(id, isFavourite) {
    const path = `/v1/jobs/${encodeURIComponent(id)}/favourite?value=${isFavourite}`;
    const job = parse(await (await ask("PUT", path)).text());
    const known = this.job(id);
    if (known) known.favourite = job.favourite;
    this.#changed();
  }

  /** A job was removed. */
  forget(id) {
    for (const name of ["finished", "older", "favourites"]) this[name] = this[name].filter((job) => job.id !== id);
    this.#changed();
  }

  #changed() {
    this.#ended = null;
    this.dispatchEvent(new Event("change"));
  }

  /** Follow the stream, reconnecting, until the page closes. */
  async follow() {
    for (let failures = 0; ; failures += 1) {
      let problem = null;
      try {
        await this.#listen(() => (failures = 0));
      } catch (error) {
        if (error instanceof Problem) problem = error;
        else console.info("the state stream ended:", error);
      }
      if (problem?.status === 401) {
        this.#connect("locked");
        await new Promise((resolve) => (this.#wake = resolve));
        failures = -1;
        continue;
      }
      await this.#pause(Math.max(PAUSES_S[Math.min(failures, 4)], problem?.retryAfter ?? 0), problem);
    }
  }

  /** Try now: the network is back, the key was accepted, or the user clicked the button. */
  retry() {
    this.#wake?.();
    if (this.connection.kind === "lost") this.#request?.abort();
  }

  async #listen(succeeded) {
    const request = (this.#request = new AbortController());
    let watch = 0;
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(() => request.abort(), SILENCE_S * 1000);
    };
    alive();
    try {
      const response = await ask("GET", "/v1/state/events", { signal: request.signal });
      for await (const [name, data] of events(response, alive)) {
        if (name === "state") this.#begin(parse(data));
        else if (name === "change") this.#apply(parse(data));
        else continue;
        succeeded();
        if (this.connection.kind !== "live") this.#connect("live");
        this.dispatchEvent(new Event("change"));
      }
    } finally {
      clearTimeout(watch);
      request.abort();
    }
  }

  async #pause(seconds, problem) {
    const reason = problem?.status ? sentence(problem.message) : "";
    const until = performance.now() + seconds * 1000;
    let isAwake = false;
    const woken = new Promise((resolve) => (this.#wake = resolve)).then(() => (isAwake = true));
    while (!isAwake && performance.now() < until) {
      const left = Math.ceil((until - performance.now()) / 1000);
      this.#connect("lost", reason, `Trying again in ${left} s.`);
      const second = new Promise((resolve) => setTimeout(resolve, 1000 * Math.min(1, seconds)));
      await Promise.race([woken, second]);
    }
    this.#wake = null;
    if (this.connection.kind === "lost") this.#connect("lost", reason, "Trying again.");
  }

  #connect(kind, reason = "", when = "") {
    this.#stoppedAt = kind === "lost" && this.state ? this.now() : null;
    this.connection = { kind, reason, when };
    this.dispatchEvent(new Event("connection"));
  }

  #begin(state) {
    this.state = state;
    this.#ahead = -Infinity;
    this.#stoppedAt = null;
    this.open = new Map(state.open.map((job) => [job.id, job]));
    this.finished = state.finished;
    [this.older, this.favourites, this.#ended] = [[], [], null];
    this.#after = { all: null, favourites: null };
    this.hasOlder = { all: state.finished.length >= SHOWN, favourites: true };
    this.timeline = new Map(state.timeline.map((bar) => [bar.key, bar]));
    this.#tick(state.server_time);
  }

  #apply(change) {
    this.#tick(change.server_time);
    for (const name of ["status", "reason", "policy", "models", "ranks", "num_open"]) {
      if (name in change) this.state[name] = change[name];
    }
    for (const bar of change.timeline ?? []) this.timeline.set(bar.key, bar);
    for (const job of change.open ?? []) this.open.set(job.id, job);
    const gone = new Set(change.removed ?? []);
    const news = change.finished ?? [];
    if (news.length || gone.size) {
      const known = new Map(news.map((job) => [job.id, job]));
      const kept = this.finished.filter((job) => !known.has(job.id));
      const ended = [...news, ...kept];
      this.finished = ended.slice(0, SHOWN).filter((job) => !gone.has(job.id));
      const pushedOut = ended.slice(SHOWN);
      if (this.older.length) this.older = [...pushedOut, ...this.older];
      else if (pushedOut.length) this.hasOlder.all = true;
      this.#ended = null;
      for (const id of known.keys()) this.open.delete(id);
    }
    if (change.order) {
      const ordered = change.order.filter((id) => this.open.has(id)).map((id) => [id, this.open.get(id)]);
      this.open = new Map(ordered);
    }
    this.#forget();
  }

  /** Remove bars that are older than the longest timeline. */
  #forget() {
    const since = this.now() - 125;
    for (const [key, bar] of this.timeline) {
      if (bar.ended_at !== null && bar.ended_at < since) this.timeline.delete(key);
    }
  }

  /** The least delayed message gives the best estimate. */
  #tick(serverTime) {
    this.#ahead = Math.max(this.#ahead, serverTime - performance.now() / 1000);
  }
}

/** For the header Idempotency-Key: the server makes one job for all requests with the same key. */
export function newKey() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("-");
}
