// The lightbox: one result as large as the window, or two side by side.

import { complete } from "./acts.js";
import { ask, at } from "./live.js";
import { byId, bytesOf, clock, duration, make, mark, say, sized, stillness, write } from "./words.js";

export class Lightbox {
  #live;
  #acts;
  #jobs = () => [];
  #shownId = null;
  #heldId = null; // the job to compare with
  #closed;

  /** `closed` is called with the job that was shown. */
  constructor({ live, acts, closed }) {
    [this.#live, this.#acts, this.#closed] = [live, acts, closed];
    const viewer = byId("viewer");
    byId("viewer-close").addEventListener("click", () => viewer.close());
    byId("viewer-before").addEventListener("click", () => this.#step(-1));
    byId("viewer-after").addEventListener("click", () => this.#step(1));
    byId("viewer-remove").addEventListener("click", () => this.#remove());
    byId("viewer-compare").addEventListener("click", () => this.#compare());
    viewer.addEventListener("close", () => this.#close());
    viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
    viewer.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way || event.target.tagName === "VIDEO") return;
      event.preventDefault();
      this.#step(way);
    });
  }

  /** Show a job of a list, next to another one if it is given. */
  open(id, { jobs = this.#jobs, beside = null } = {}) {
    [this.#jobs, this.#heldId] = [jobs, beside];
    this.#show(id);
    if (!byId("viewer").open) byId("viewer").showModal();
  }

  /** The list has changed. */
  refresh() {
    if (byId("viewer").open) this.#showPlace();
  }

  #show(id) {
    const job = this.#live.job(id);
    if (!job) return;
    this.#shownId = id;
    write(byId("viewer-prompt"), job.prompt);
    write(byId("viewer-wrong"), "");
    const held = this.#heldId && this.#live.job(this.#heldId);
    const shown = [...(held ? [held] : []), job];
    byId("viewer-show").replaceChildren(...shown.map((each) => figure(each, { isCaptioned: shown.length > 1 })));
    byId("viewer-facts").replaceChildren(...this.#facts(job));
    const failed = (text) => write(byId("viewer-wrong"), text);
    byId("viewer-acts").replaceChildren(...this.#acts.buttons(job, { left: () => byId("viewer").close(), failed }));
    byId("viewer-compare").hidden = job.status !== "completed";
    mark(byId("viewer-compare"), "aria-pressed", Boolean(held));
    this.#askFirst();
    this.#showPlace();
    if (job.prompt.length >= 300 || job.status === "completed") this.#complete(job);
  }

  /** Add what the live state omits: the rest of a long prompt, and the file size. */
  async #complete(job) {
    try {
      const whole = await complete(job);
      if (this.#shownId === job.id) write(byId("viewer-prompt"), whole.prompt);
      if (job.status !== "completed") return;
      const size = Number((await ask("HEAD", job.content_url)).headers.get("Content-Length"));
      if (this.#shownId === job.id && size) byId("viewer-facts").append(...fact("file", bytesOf(size)));
    } catch {
      // the dialog works without it
    }
  }

  #facts(job) {
    const now = this.#live.now();
    const took = job.completed_at && job.started_at ? duration(job.completed_at - job.started_at) : null;
    const late = { true: "met", false: "missed" }[job.will_meet_deadline] ?? null;
    const length = job.object === "video" ? `${job.frames} at ${job.fps} per second` : null;
    const after = took ? `, ${took} after its start` : "";
    const ended = job.completed_at ? `${clock(job.completed_at, now)}${after}` : null;
    return [
      ...fact("model", job.model), ...fact("size", sized(job.size)), ...fact("frames", length),
      ...fact("steps", job.status === "completed" ? job.steps : `${job.step} of ${job.steps}`),
      ...fact("seed", job.seed), ...fact("priority", job.priority || null), ...fact("tag", job.tag),
      ...fact("deadline", late), ...fact("ended", ended), ...fact("id", job.id),
      ...fact("warnings", job.warnings?.join("; ")),
    ];
  }

  #showPlace() {
    const [place, num] = [this.#place(), this.#jobs().length];
    write(byId("viewer-place"), place < 0 ? "" : `${(place + 1).toLocaleString()} of ${num.toLocaleString()}`);
    mark(byId("viewer-before"), "aria-disabled", place > 0 ? null : "true");
    mark(byId("viewer-after"), "aria-disabled", place < 0 || place === num - 1 ? "true" : null);
  }

  #place() {
    return this.#jobs().findIndex((job) => job.id === this.#shownId);
  }

  #step(way) {
    const next = this.#place() < 0 ? null : this.#jobs()[this.#place() + way];
    if (next) this.#show(next.id);
  }

  /** Hold this result on the left; the arrows then change the right one. */
  #compare() {
    const isOn = this.#heldId !== null;
    this.#heldId = isOn ? null : this.#shownId;
    if (isOn) return this.#show(this.#shownId);
    const near = [1, -1].map((way) => this.#jobs()[this.#place() + way]).find((job) => job?.status === "completed");
    this.#show(near?.id ?? this.#shownId);
    say("The left one stays; the arrow keys change the right one");
  }

  #close() {
    if (byId("viewer").open) return; // reopened before this event
    byId("viewer-show").replaceChildren();
    const id = this.#shownId;
    [this.#shownId, this.#heldId] = [null, null];
    this.#closed(id);
  }

  /** Removal is final, so the first click only asks. */
  #askFirst() {
    const button = byId("viewer-remove");
    delete button.dataset.sure;
    write(button, "Remove");
  }

  async #remove() {
    const [button, job] = [byId("viewer-remove"), this.#live.job(this.#shownId)];
    if (!job) return byId("viewer").close();
    if (!button.dataset.sure && job.status === "completed") {
      button.dataset.sure = "yes";
      return write(button, "Remove the file?");
    }
    try {
      await ask("DELETE", `/v1/jobs/${encodeURIComponent(job.id)}?purge=true`);
    } catch (problem) {
      this.#askFirst();
      return write(byId("viewer-wrong"), problem.message);
    }
    this.#live.forget(job.id);
    say(`Removed: ${job.prompt}`);
    byId("viewer").close();
    byId("results-title").focus({ preventScroll: true });
  }
}

/** A result in full size. */
export function picture(job) {
  const [width, height] = job.size.split("x").map(Number);
  if (job.object !== "video") return make("img", { src: at(job.content_url), alt: job.prompt, width, height });
  const video = make("video", { src: at(job.content_url), poster: at(job.thumbnail_url), width, height });
  [video.controls, video.loop] = [true, true];
  [video.muted, video.playsInline, video.autoplay] = [true, true, !stillness.matches];
  video.setAttribute("aria-label", job.prompt);
  return video;
}

function figure(job, { isCaptioned }) {
  const shown = job.status === "completed" ? picture(job) : ending(job);
  const caption = make("figcaption", {}, `seed ${job.seed} \u00b7 ${sized(job.size)} \u00b7 ${job.prompt}`);
  return make("figure", {}, shown, ...(isCaptioned ? [caption] : []));
}

function ending(job) {
  const sign = job.status === "failed" ? "\u2717 Failed: " : "";
  return make("p", { class: `end ${job.status}` }, `${sign}${job.error?.message ?? `This job was ${job.status}.`}`);
}

function fact(name, value) {
  if (value === null || value === undefined) return [];
  return [make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))];
}
