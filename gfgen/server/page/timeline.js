// The timeline: one lane for each rank, bars coloured by job; and the legend.

import { dye, Paints } from "./colours.js";
import { arrange, byId, make, mark, stillness, write } from "./words.js";
import { counted, doing, duration, hour, ranksOf, sharing } from "./words.js";

const LAG_S = 0.3; // delay behind the server's time, so that a bar's end is known when it is drawn
const AXIS = 22;
const GAP = 5; // between the bars of two lanes; bars of one job are joined across it
const AHEAD = 0.06; // share of the width after now
const MAX_LEGEND = 14;

export class Timeline {
  #live;
  #colours;
  #picked;
  #canvas = byId("timeline");
  #brush = this.#canvas.getContext("2d");
  #paints = null;
  #lanes = [];
  #places = new Map(); // of the lane of each rank
  #entries = new Map();
  #spanS = 60;
  #size = { width: 0, height: 0, lane: 30 };
  #isSeen = true;
  #drawnAt = 0;
  #pointer = null;

  constructor({ live, colours, picked }) {
    [this.#live, this.#colours, this.#picked] = [live, colours, picked];
    const box = this.#canvas.parentElement;
    new ResizeObserver(() => this.#fit()).observe(box);
    new IntersectionObserver(([entry]) => (this.#isSeen = entry.isIntersecting)).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#paints = null;
      this.#drawnAt = 0;
    });
    byId("span").addEventListener("change", (event) => {
      this.#spanS = Number(event.target.value);
      this.#drawnAt = 0;
    });
    this.#canvas.addEventListener("pointermove", (event) => (this.#pointer = [event.offsetX, event.offsetY]));
    this.#canvas.addEventListener("pointerleave", () => {
      this.#pointer = null;
      this.#point();
    });
    this.#canvas.addEventListener("click", (event) => {
      const found = this.#under(event.offsetX, event.offsetY);
      this.#picked.keep(found?.job_id ?? null);
    });
    picked.addEventListener("change", () => (this.#drawnAt = 0));
    byId("timeline-fold").addEventListener("click", () => {
      localStorage.timeline = localStorage.timeline === "no" ? "yes" : "no";
      this.#fold();
    });
    this.#fold();
    requestAnimationFrame((at) => this.#turn(at));
  }

  #fold() {
    const isFolded = localStorage.timeline === "no";
    byId("chart").hidden = isFolded;
    mark(byId("timeline-fold"), "aria-expanded", !isFolded);
    write(byId("timeline-fold"), isFolded ? "Show" : "Hide");
  }

  /** The state has changed. */
  show() {
    const open = [...this.#live.open.values()];
    const begun = open.filter((job) => job.status === "in_progress").map((job) => job.id);
    const since = this.#live.now() - this.#spanS;
    const recent = [...this.#live.timeline.values()].filter((s) => s.ended_at === null || s.ended_at > since);
    const busy = recent.filter((bar) => bar.ended_at === null).map((bar) => bar.job_id);
    const shown = recent.map((bar) => bar.job_id);
    this.#colours.share([...shown, ...begun]);
    this.#showRanks();
    this.#showLegend(new Set(shown), new Set(busy));
    this.#drawnAt = 0;
  }

  #showRanks() {
    const ranks = this.#live.state.ranks;
    while (this.#lanes.length < ranks.length) this.#lanes.push(lane());
    this.#lanes.length = ranks.length;
    arrange(byId("ranks"), this.#lanes.map((each) => each.row));
    const label = `Timeline of ${counted(ranks.length, "rank")}; the lists next to it have the same information`;
    mark(this.#canvas, "aria-label", label);
    byId("ranks").parentElement.classList.toggle("of-nodes", ranks.some((rank) => rank.node !== null));
    this.#places = new Map(ranks.map((rank, place) => [rank.rank, place]));
    ranks.forEach((rank, place) => {
      const isFirst = rank.node !== null && rank.node !== ranks[place - 1]?.node;
      this.#showRank(rank, this.#lanes[place], isFirst);
    });
    if (this.#size.ranks !== ranks.length) this.#fit();
  }

  /** The first rank of a node has the node's name, and a line above. */
  #showRank(rank, { row, swatch, name, node, what, use, whose }, isFirst) {
    const task = rank.task;
    row.classList.toggle("node-first", isFirst);
    write(node, isFirst ? rank.node : "");
    row.dataset.status = rank.status;
    dye(swatch, task ? this.#colours.of(task.job_id) : null);
    write(name, `${rank.rank}`);
    const restarts = rank.restarts ? `, restarted ${counted(rank.restarts, "time")}` : "";
    write(what, task ? doing(task.stage, task.step, task.steps) : rank.status);
    write(whose, task ? `, ${this.#title(task.job_id)}, on ${ranksOf(task.layout)}${restarts}` : restarts);
    write(use, `${Math.round(100 * rank.utilisation)}%`);
  }

  /** Open jobs, then ended ones, then jobs that no list has; latest first in each group. */
  #showLegend(shown, busy) {
    for (const id of [...this.#entries.keys()]) {
      if (!shown.has(id) && this.#entries.delete(id)) this.#picked.leave(id);
    }
    const came = [...this.#entries.keys(), ...[...shown].filter((id) => !this.#entries.has(id))].reverse();
    const isOpen = (id) => this.#live.open.has(id);
    const kind = (id) => (isOpen(id) ? 0 : this.#live.job(id) ? 1 : 2);
    const ids = [0, 1, 2].flatMap((each) => came.filter((id) => kind(id) === each)).slice(0, MAX_LEGEND);
    for (const id of ids) if (!this.#entries.has(id)) this.#entries.set(id, this.#entry(id));
    arrange(byId("legend"), ids.map((id) => this.#entries.get(id).row));
    byId("legend-empty").hidden = ids.length > 0;
    for (const id of ids) {
      const { button, swatch, title, where } = this.#entries.get(id);
      const job = this.#live.job(id);
      dye(swatch, this.#colours.of(id));
      write(title, this.#title(id));
      const words = { completed: "done", in_progress: "paused", queued: "waiting" };
      const text = words[job?.status] ?? job?.status ?? "gone";
      write(where, busy.has(id) && job?.layout ? ranksOf(job.layout) : text);
      mark(button, "aria-pressed", this.#picked.kept === id);
    }
  }

  #entry(id) {
    const swatch = make("i", { class: "swatch none" });
    const [title, where] = [make("b"), make("small")];
    const button = make("button", { type: "button", title: "Highlight this job" }, swatch, title, where);
    button.addEventListener("click", () => this.#picked.keep(this.#picked.kept === id ? null : id));
    button.addEventListener("pointerenter", () => this.#picked.touch(id));
    button.addEventListener("pointerleave", () => this.#picked.touch(null));
    return { row: make("li", {}, button), button, swatch, title, where };
  }

  #title(jobId) {
    return this.#live.job(jobId)?.prompt ?? jobId;
  }

  // Drawing ------------------------------------------------------------------------------------------

  #fit() {
    const box = this.#canvas.parentElement;
    const ranks = Math.max(1, this.#live.state?.ranks.length ?? 4);
    const lane = Math.max(20, Math.min(32, Math.floor(128 / ranks)));
    const [width, height] = [box.clientWidth, lane * ranks + AXIS];
    const sharpness = devicePixelRatio || 1;
    this.#size = { width, height, lane, ranks };
    byId("ranks").parentElement.style.setProperty("--lane-height", `${lane}px`);
    this.#canvas.style.height = `${height}px`;
    this.#canvas.width = Math.round(width * sharpness);
    this.#canvas.height = Math.round(height * sharpness);
    this.#brush.setTransform(sharpness, 0, 0, sharpness, 0, 0);
    this.#paints = null;
    this.#draw();
  }

  /** Draw at most once per half pixel of movement, because the server may run on the same machine. */
  #turn(at) {
    const halfPixelMs = (500 * this.#spanS) / Math.max(1, this.#size.width);
    const pauseMs = stillness.matches ? 1000 : Math.max(33, halfPixelMs);
    if (this.#isSeen && at - this.#drawnAt >= pauseMs) {
      this.#drawnAt = at;
      this.#draw();
      this.#point();
    }
    requestAnimationFrame((next) => this.#turn(next));
  }

  get #nowS() {
    return this.#live.now() - LAG_S;
  }

  #x(at, nowS) {
    const nowX = this.#size.width * (1 - AHEAD);
    return nowX + ((at - nowS) * nowX) / this.#spanS;
  }

  #draw() {
    const { width, height, lane } = this.#size;
    if (!width || !this.#live.state) return;
    const brush = this.#brush;
    const nowS = this.#nowS;
    this.#paints ??= new Paints(brush);
    brush.clearRect(0, 0, width, height);
    brush.fillStyle = this.#paints.lane;
    this.#live.state.ranks.forEach((_, place) => {
      brush.beginPath();
      brush.roundRect(0, place * lane + GAP / 2, width, lane - GAP, 3);
      brush.fill();
    });
    this.#drawAxis(nowS);
    const bars = this.#bars(nowS);
    for (const each of bars) this.#drawJoint(each);
    for (const each of bars) this.#drawBar(each);
    for (const rank of this.#live.state.ranks) this.#drawPrediction(rank, nowS);
    for (const each of bars) this.#drawWords(each);
    brush.globalAlpha = 1;
    brush.fillStyle = this.#paints.ink;
    brush.fillRect(Math.round(this.#x(nowS, nowS)), 0, 1.5, height - AXIS + 4);
  }

  #drawAxis(nowS) {
    const { width, height } = this.#size;
    const brush = this.#brush;
    const nowX = this.#x(nowS, nowS);
    const steps = [5, 10, 20, 30, 60];
    const stepS = steps.find((each) => (each * nowX) / this.#spanS >= 76) ?? 60;
    brush.font = `11px ${this.#paints.font}`;
    brush.textBaseline = "alphabetic";
    brush.textAlign = "center";
    for (let at = Math.ceil((nowS - this.#spanS) / stepS) * stepS; at < nowS; at += stepS) {
      const x = this.#x(at, nowS);
      brush.fillStyle = this.#paints.line;
      brush.fillRect(Math.round(x), 0, 1, height - AXIS + 4);
      brush.fillStyle = this.#paints.faint;
      if (x > 30 && x < nowX - 44) brush.fillText(hour(at), x, height - 5);
    }
    brush.fillStyle = this.#paints.ink;
    brush.fillText("now", Math.min(nowX, width - 14), height - 5);
  }

  /** The visible bars with their positions. */
  #bars(nowS) {
    const { width, lane } = this.#size;
    const visible = [];
    const all = [...this.#live.timeline.values()];
    const picked = all.some((each) => each.job_id === this.#picked.job) ? this.#picked.job : null;
    for (const bar of all) {
      const colour = this.#colours.of(bar.job_id);
      const from = this.#x(bar.started_at, nowS);
      const to = this.#x(Math.min(bar.ended_at ?? nowS, nowS), nowS);
      const place = this.#places.get(bar.rank); // none of ranks that are gone
      if (place === undefined || colour === null || to < 0 || from > width || from > to) continue;
      const left = Math.max(from, -8);
      const isFaint = picked !== null && picked !== bar.job_id;
      const top = place * lane + GAP / 2;
      const barWidth = Math.max(1.5, to - left - 1);
      visible.push({ bar, colour, isFaint, left, top, width: barWidth, height: lane - GAP });
    }
    return visible;
  }

  /** Join the lanes of one step: fill the gap, or draw a line across another rank. */
  #drawJoint({ bar, colour, left, width, top, height, isFaint }) {
    const next = Math.min(...bar.layout.ranks.filter((rank) => rank > bar.rank));
    if (next === Infinity) return;
    const brush = this.#brush;
    const isNear = next === bar.rank + 1;
    const isPale = isNear && !["denoise", "refine"].includes(bar.stage);
    brush.globalAlpha = isFaint ? 0.2 : isPale ? 0.4 : 1;
    brush.fillStyle = isNear && !isPale ? this.#paints.fill(colour) : this.#paints.edge(colour);
    const gap = (next - bar.rank) * this.#size.lane - height;
    brush.fillRect(left, top + height - 1, isNear ? width : Math.min(2.5, width), gap + 2);
  }

  #drawBar({ bar, colour, left, width, top, height, isFaint }) {
    const brush = this.#brush;
    const isPale = !["denoise", "refine"].includes(bar.stage);
    brush.beginPath();
    brush.roundRect(left, top, width, height, Math.min(3, width / 2));
    if (isPale) {
      brush.globalAlpha = isFaint ? 0.2 : 1;
      brush.fillStyle = this.#paints.panel;
      brush.fill();
      brush.globalAlpha = isFaint ? 0.1 : 0.4;
    } else brush.globalAlpha = isFaint ? 0.2 : 1;
    brush.fillStyle = isPale ? this.#paints.edge(colour) : this.#paints.fill(colour);
    brush.fill();
    if (isPale && width > 4) {
      brush.globalAlpha = isFaint ? 0.2 : 1;
      brush.strokeStyle = this.#paints.edge(colour);
      brush.lineWidth = 1.5;
      brush.beginPath();
      brush.roundRect(left + 0.75, top + 0.75, width - 1.5, height - 1.5, 2.5);
      brush.stroke();
    }
  }

  /** The predicted rest of the running task. */
  #drawPrediction({ rank, task }, nowS) {
    if (!task) return;
    const colour = this.#colours.of(task.job_id);
    const from = this.#x(nowS, nowS);
    const to = Math.min(this.#x(task.predicted_end_at, nowS), this.#size.width);
    if (colour === null || to - from < 2) return;
    this.#brush.globalAlpha = 0.35;
    this.#brush.fillStyle = this.#paints.edge(colour);
    this.#brush.fillRect(from, this.#places.get(rank) * this.#size.lane + GAP / 2, to - from, this.#size.lane - GAP);
  }

  /** The prompt in a job's first lane, and how the ranks share the step in the second. */
  #drawWords({ bar, colour, left, width, top, height, isFaint }) {
    const from = Math.max(left, 0);
    const room = left + width - from - 10;
    if (room < 30 || isFaint) return;
    const slot = bar.layout.ranks.filter((rank) => rank < bar.rank).length;
    const brush = this.#brush;
    brush.font = `${slot ? "" : "500 "}12px ${this.#paints.font}`;
    const words = [this.#title(bar.job_id).slice(0, 90), sharing(bar.layout)];
    const text = this.#fitting(words[slot] ?? "", room);
    if (!text) return;
    const isPale = !["denoise", "refine"].includes(bar.stage);
    brush.globalAlpha = 1;
    brush.textBaseline = "middle";
    brush.textAlign = "left";
    if (colour >= this.#paints.plain.length && !isPale) {
      brush.fillStyle = this.#paints.edge(colour); // a plain background keeps the text readable
      brush.fillRect(from + 3, top + height / 2 - 8, brush.measureText(text).width + 6, 16);
    }
    brush.fillStyle = isPale ? this.#paints.ink : this.#paints.text(colour);
    brush.fillText(text, from + 6, top + height / 2 + 0.5);
  }

  /** The text shortened to fit; empty if fewer than 5 characters fit. */
  #fitting(text, room) {
    const width = this.#brush.measureText(text).width;
    if (width <= room) return text;
    const cut = Math.floor((text.length * (room - 9)) / width);
    return cut < 5 ? "" : `${text.slice(0, cut).trimEnd()}\u2026`;
  }

  // Pointing -----------------------------------------------------------------------------------------

  #under(x, y) {
    const { lane, width } = this.#size;
    const nowX = width * (1 - AHEAD);
    const nowS = this.#nowS;
    const at = nowS + ((x - nowX) * this.#spanS) / nowX;
    const nearS = (2 * this.#spanS) / nowX;
    const place = Math.floor(y / lane);
    for (const bar of this.#live.timeline.values()) {
      const end = bar.ended_at ?? nowS;
      if (this.#places.get(bar.rank) === place && bar.started_at - nearS <= at && at <= end + nearS) return bar;
    }
    return null;
  }

  /** Describe the bar under the pointer. The lists have the same information. */
  #point() {
    const tip = byId("tip");
    const found = this.#pointer && this.#under(...this.#pointer);
    tip.hidden = !found;
    if (!found) return;
    const job = this.#live.job(found.job_id);
    const tookS = (found.ended_at ?? this.#nowS) - found.started_at;
    const steps = `steps ${found.first_step + 1} to ${found.last_step + 1} of ${job?.steps ?? "?"}`;
    const what = ["denoise", "refine"].includes(found.stage) ? steps : doing(found.stage, null, 0);
    const where = `${ranksOf(found.layout)} ${sharing(found.layout)}`;
    write(tip, `${this.#title(found.job_id)}\n${what}, ${duration(tookS)}\n${where}`);
    const panel = tip.offsetParent.getBoundingClientRect();
    const box = this.#canvas.getBoundingClientRect();
    const x = box.left - panel.left + this.#pointer[0] + 14;
    tip.style.left = `${Math.max(4, Math.min(x, panel.width - tip.offsetWidth - 8))}px`;
    tip.style.top = `${box.top - panel.top + this.#pointer[1] + 16}px`;
  }
}

function lane() {
  const swatch = make("i", { class: "swatch none" });
  const [name, what] = [make("b", { class: "rank-name" }), make("span", { class: "rank-what" })];
  const node = make("span", { class: "rank-node" });
  const use = make("span", { class: "rank-use", title: "Busy in the last minute" });
  const whose = make("span", { class: "unseen" });
  const row = make("li", {}, swatch, make("span", { class: "unseen" }, "Rank "), name, node, what, whose, use);
  return { row, swatch, name, node, what, use, whose };
}
