// The open jobs: started ones, then the queue in its predicted order.

import { dye } from "./colours.js";
import { ask, at, parse } from "./live.js";
import { arrange, byId, make, mark, say, write } from "./words.js";
import { clock, counted, countdown, doing, facts, ordinal, ranksOf, sharing } from "./words.js";

const PAUSE_S = 1;
const SURE_MS = 5000;
const SHORT = 5; // rows on a narrow screen before "Show all" (page.css)

export class Queue {
  #live;
  #colours;
  #picked;
  #asking; // the timer of a first click on "Cancel all"
  #rows = new Map();
  #busy = new Set(); // jobs with a running task

  constructor({ live, colours, picked }) {
    [this.#live, this.#colours, this.#picked] = [live, colours, picked];
    picked.addEventListener("change", () => this.#showPicked());
    byId("queue-all").addEventListener("click", () => {
      byId("queue").classList.toggle("short");
      this.show();
    });
    byId("queue-cancel").addEventListener("click", () => this.#cancelAll());
    byId("queue-cancel").addEventListener("blur", () => this.#askFirst());
  }

  show() {
    const { open, state } = this.#live;
    this.#busy = this.#busyNow();
    const focused = document.activeElement?.closest?.("#queue .job");
    const place = focused ? [...focused.parentElement.children].indexOf(focused) : -1;
    for (const id of [...this.#rows.keys()]) {
      if (!open.has(id) && this.#rows.delete(id)) this.#picked.leave(id);
    }
    for (const job of open.values()) {
      if (!this.#rows.has(job.id)) this.#rows.set(job.id, this.#row(job));
      this.#fill(this.#rows.get(job.id), job);
    }
    const isPaused = (job) => Number(job.status === "in_progress" && !this.#isAtWork(job));
    const kind = (job) => (job.status === "queued" ? 2 : isPaused(job));
    const sorted = [...open.values()].sort((a, b) => kind(a) - kind(b));
    arrange(byId("queue"), sorted.map((job) => this.#rows.get(job.id).row));
    if (focused && !focused.isConnected) this.#keepFocus(place);
    byId("queue-empty").hidden = open.size > 0;
    this.#showCount([...open.values()], state.num_open);
    this.#showPicked();
  }

  /** Jobs with work in the last PAUSE_S: the gap between two steps does not count as a pause. */
  #busyNow() {
    const since = this.#live.now() - PAUSE_S;
    const recent = [...this.#live.timeline.values()].filter((s) => s.ended_at === null || s.ended_at > since);
    const tasks = this.#live.state.ranks.flatMap((rank) => rank.task ?? []);
    return new Set([...recent, ...tasks].map((work) => work.job_id));
  }

  #isAtWork(job) {
    return this.#busy.has(job.id) || job.stage === "write";
  }

  #showCount(jobs, numOpen) {
    const begun = jobs.filter((job) => job.status === "in_progress");
    const paused = begun.filter((job) => !this.#isAtWork(job)).length;
    const parts = [`${begun.length - paused} running`, `${numOpen - begun.length} waiting`];
    if (paused) parts.splice(1, 0, `${paused} paused`);
    if (numOpen > jobs.length) parts.push(`showing the first ${jobs.length}`);
    write(byId("queue-count"), parts.join(", "));
    byId("queue-cancel").hidden = numOpen < 2;
    byId("queue-all").hidden = jobs.length <= SHORT;
    const isShort = byId("queue").classList.contains("short");
    write(byId("queue-all"), isShort ? `Show all ${jobs.length}` : "Show fewer");
  }

  #row(job) {
    const name = job.prompt.slice(0, 80);
    const swatch = make("i", { class: "swatch none" });
    const look = make("div", { class: "job-look" }, swatch);
    const prompt = make("p", { class: "job-prompt", title: job.prompt }, job.prompt);
    const what = make("p", { class: "job-facts" });
    const bar = make("progress", { max: 100, "aria-label": `Progress of ${name}` });
    const [percent, where] = [make("span", { class: "job-percent" }), make("p", { class: "job-where" })];
    const [done, deadline] = [make("p", { class: "job-done" }), make("p", { class: "job-deadline" })];
    const priority = make("input", { inputMode: "numeric", maxLength: 8, "aria-label": `Priority of ${name}` });
    const urgency = make("label", { class: "job-priority" }, "priority ", priority);
    priority.addEventListener("change", () => this.#prioritise(job, priority));
    const whose = make("span", { class: "unseen" }, ` ${name}`);
    const button = make("button", { type: "button", class: "quiet" }, "Cancel", whose);
    const row = make("li", { class: "job", data: { id: job.id } },
      look,
      prompt,
      what,
      make("div", { class: "job-state" }, make("div", { class: "job-bar" }, bar, percent), where, urgency),
      make("div", { class: "job-times" }, done, deadline),
      button);
    button.addEventListener("click", () => this.#cancel(job, button));
    row.addEventListener("pointerenter", () => this.#picked.touch(job.id));
    row.addEventListener("pointerleave", () => this.#picked.touch(null));
    return { row, look, swatch, what, priority, bar, percent, where, done, deadline };
  }

  #fill({ row, look, swatch, what, priority, bar, percent, where, done, deadline }, job) {
    const now = this.#live.now();
    row.dataset.status = job.status;
    dye(swatch, job.status === "in_progress" ? this.#colours.of(job.id) : null);
    this.#showPreview(row, look, job);
    write(what, facts(job));
    if (document.activeElement !== priority) priority.value = job.priority;
    mark(what, "title", facts(job));
    bar.value = job.progress;
    write(percent, `${job.progress}%`);
    const isAtWork = this.#isAtWork(job);
    write(where, job.status === "queued" ? waiting(job, now) : isAtWork ? running(job) : paused(job));
    const endsAt = job.predicted_completion_at;
    const left = endsAt > now ? `done in ${countdown(endsAt - now)}` : "done any moment";
    write(done, endsAt === null ? "\u2013" : left);
    mark(done, "title", endsAt === null ? null : clock(endsAt, now));
    mark(where, "title", where.textContent);
    const [text, kind] = deadlineOf(job, now);
    write(deadline, text);
    mark(deadline, "data-kind", kind);
    mark(deadline, "title", job.deadline_at === null ? null : clock(job.deadline_at, now));
  }

  /** A picture of the job after its last step; a new one only when the one before has come. */
  #showPreview(row, look, job) {
    if (!job.preview_url) return;
    row.classList.add("seen");
    let image = look.querySelector("img");
    if (!image) {
      image = make("img", { alt: "" });
      image.addEventListener("load", () => image.classList.remove("broken"));
      image.addEventListener("error", () => image.classList.add("broken"));
      look.prepend(image);
    }
    const url = `${at(job.preview_url)}?step=${job.step}`;
    if (image.getAttribute("src") !== url && image.complete) image.src = url;
  }

  #showPicked() {
    for (const [id, { row }] of this.#rows) row.classList.toggle("picked", this.#picked.job === id);
  }

  /** Move the focus from a removed row to the next one. */
  #keepFocus(place) {
    const rows = byId("queue").children;
    const next = rows[Math.min(place, rows.length - 1)]?.querySelector("button") ?? byId("queue-title");
    next.focus({ preventScroll: true });
  }

  #askFirst() {
    clearTimeout(this.#asking);
    delete byId("queue-cancel").dataset.sure;
    write(byId("queue-cancel"), "Cancel all");
  }

  /** Cancel every open job, also those that the page does not show; the first click only asks. */
  async #cancelAll() {
    const button = byId("queue-cancel");
    if (!button.dataset.sure) {
      button.dataset.sure = "yes";
      this.#asking = setTimeout(() => this.#askFirst(), SURE_MS);
      return write(button, `Cancel ${this.#live.state.num_open} jobs?`);
    }
    this.#askFirst();
    let num = 0;
    try {
      for (let after = "", page; !page || page.has_more; after = `&after=${page.last_id}`) {
        page = parse(await (await ask("GET", `/v1/jobs?ended=false&limit=100${after}`)).text());
        await Promise.all(page.data.map((job) => ask("POST", `/v1/jobs/${job.id}/cancel`)));
        num += page.data.length;
      }
      say(`${counted(num, "job")} cancelled`);
    } catch (problem) {
      button.title = problem.message;
      say(`Not all jobs are cancelled: ${problem.message}`);
    }
  }

  async #prioritise(job, field) {
    const text = field.value.trim();
    try {
      if (!/^-?\d{1,7}$/.test(text)) throw new Error("a whole number is accepted");
      await ask("POST", `/v1/jobs/${job.id}`, { json: { priority: Number(text) } });
      field.title = "";
      mark(field, "aria-invalid", null);
      say(`Priority ${text}: ${job.prompt}`);
    } catch (problem) {
      field.title = problem.message;
      mark(field, "aria-invalid", "true");
      say(`The priority did not change: ${problem.message}`);
    }
  }

  async #cancel(job, button) {
    if (button.getAttribute("aria-disabled") === "true") return;
    mark(button, "aria-disabled", "true");
    button.firstChild.data = "Cancelling";
    try {
      await ask("POST", `/v1/jobs/${encodeURIComponent(job.id)}/cancel`);
      say(`Cancelled: ${job.prompt}`);
    } catch (problem) {
      mark(button, "aria-disabled", null);
      button.firstChild.data = "Cancel";
      button.title = problem.message;
      say(`Not cancelled: ${problem.message}`);
    }
  }
}

function waiting(job, now) {
  const later = job.position === null ? "waiting" : `${ordinal(job.position)} in the queue`;
  const place = job.position === 1 ? "next" : later;
  const startsAt = job.predicted_start_at;
  return startsAt === null || startsAt <= now ? place : `${place}, starts in ${countdown(startsAt - now)}`;
}

function paused(job) {
  return job.step > 0 ? `paused at step ${job.step} of ${job.steps}` : "paused at the start";
}

function running(job) {
  const what = doing(job.stage, Math.min(job.step, job.steps - 1), job.steps);
  if (!job.layout) return what;
  const how = sharing(job.layout);
  return `${what} on ${ranksOf(job.layout)}${how ? ` (${how})` : ""}`;
}

/** A symbol and text, so that colour is not the only cue. */
function deadlineOf(job, now) {
  if (job.deadline_at === null) return ["no deadline", "none"];
  const leftS = job.deadline_at - now;
  const slackS = job.predicted_completion_at === null ? null : job.deadline_at - job.predicted_completion_at;
  if (slackS === null && leftS <= 0) return ["\u2717 deadline missed", "late"];
  if (slackS !== null && (leftS <= 0 || job.will_meet_deadline === false)) {
    return [`\u2717 ${countdown(Math.max(-slackS, -leftS))} late`, "late"];
  }
  if (job.will_meet_deadline) return [`\u2713 due in ${countdown(leftS)}`, "met"];
  return [`due in ${countdown(leftS)}`, "open"];
}
