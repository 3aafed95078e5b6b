// Ended jobs: thumbnails, and the dialog that shows one job.

import { ask, at, parse } from "./live.js";
import { arrange, byId, make, mark, say, stillness, write } from "./words.js";
import { bytesOf, clock, duration, sized } from "./words.js";

export class Results {
  #live;
  #tiles = new Map();
  #shownId = null;
  #again;

  constructor({ live, again }) {
    [this.#live, this.#again] = [live, again];
    const viewer = byId("viewer");
    byId("results-more").addEventListener("click", () => this.#showMore());
    byId("viewer-close").addEventListener("click", () => viewer.close());
    byId("viewer-before").addEventListener("click", () => this.#step(-1));
    byId("viewer-after").addEventListener("click", () => this.#step(1));
    byId("viewer-remove").addEventListener("click", () => this.#remove());
    byId("viewer-again").addEventListener("click", () => this.#useAgain());
    viewer.addEventListener("close", () => this.#closed());
    viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
    viewer.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way || event.target.tagName === "VIDEO") return;
      event.preventDefault();
      this.#step(way);
    });
  }

  show() {
    const finished = this.#live.ended;
    const known = new Map(finished.map((job) => [job.id, job]));
    const focusedId = document.activeElement?.closest?.("#results .tile")?.dataset.id;
    for (const id of [...this.#tiles.keys()]) if (!known.has(id)) this.#tiles.delete(id);
    for (const job of finished) if (!this.#tiles.has(job.id)) this.#tiles.set(job.id, this.#tile(job));
    arrange(byId("results"), finished.map((job) => this.#tiles.get(job.id)));
    if (focusedId && !known.has(focusedId)) byId("results-title").focus({ preventScroll: true });
    byId("results-empty").hidden = finished.length > 0;
    const done = finished.filter((job) => job.status === "completed").length;
    write(byId("results-count"), finished.length ? `${done} completed, ${finished.length - done} not` : "");
    byId("results-more").hidden = !this.#live.hasOlder;
    if (byId("viewer").open) this.#showSteps();
  }

  async #showMore() {
    const button = byId("results-more");
    if (button.getAttribute("aria-disabled") === "true") return;
    mark(button, "aria-disabled", "true");
    try {
      await this.#live.more();
    } catch (problem) {
      say(`No more results: ${problem.message}`);
      button.title = problem.message;
    }
    mark(button, "aria-disabled", null);
  }

  #tile(job) {
    const button = make("button", { type: "button", class: "tile-button" });
    if (job.status === "completed") {
      const [width, height] = job.size.split("x").map(Number);
      const image = make("img", { width, height, alt: "", loading: "lazy", src: at(job.thumbnail_url) });
      image.addEventListener("error", () => image.classList.add("broken"));
      image.addEventListener("load", () => image.classList.remove("broken"));
      const again = () => (image.src = at(job.thumbnail_url));
      image.addEventListener("error", () => setTimeout(again, 3000), { once: true });
      button.append(image);
      const length = `\u25b6 ${Number(job.seconds ?? 0).toFixed(1)} s`;
      if (job.object === "video") button.append(make("span", { class: "badge" }, length));
    } else {
      const sign = job.status === "failed" ? "\u2717 " : "";
      button.append(make("span", { class: `end ${job.status}` }, `${sign}${job.status}`));
    }
    const late = job.will_meet_deadline === false && job.status === "completed" ? ", late" : "";
    button.append(make("span", { class: "tile-prompt" }, job.prompt));
    mark(button, "aria-label", `${job.prompt}, ${job.object}, ${job.status}${late}`);
    button.addEventListener("click", () => this.#open(job.id));
    return make("li", { class: "tile", data: { id: job.id, status: job.status }, title: job.prompt }, button);
  }

  // The dialog ---------------------------------------------------------------------------------------

  #open(id) {
    const job = this.#live.job(id);
    if (!job) return;
    this.#shownId = id;
    write(byId("viewer-prompt"), job.prompt);
    write(byId("viewer-wrong"), "");
    byId("viewer-show").replaceChildren(job.status === "completed" ? picture(job) : ending(job));
    byId("viewer-facts").replaceChildren(...this.#facts(job));
    const save = byId("viewer-save");
    save.hidden = job.status !== "completed";
    save.href = at(job.content_url);
    save.download = `${job.id}.${job.object === "video" ? "mp4" : "png"}`;
    this.#askFirst();
    this.#showSteps();
    if (!byId("viewer").open) byId("viewer").showModal();
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

  #showSteps() {
    const place = this.#place();
    const isLast = place < 0 || place === this.#live.ended.length - 1;
    mark(byId("viewer-before"), "aria-disabled", place > 0 ? null : "true");
    mark(byId("viewer-after"), "aria-disabled", isLast ? "true" : null);
  }

  #place() {
    return this.#live.ended.findIndex((job) => job.id === this.#shownId);
  }

  #step(way) {
    const next = this.#live.ended[this.#place() + way];
    if (next && this.#place() + way >= 0) this.#open(next.id);
  }

  #closed() {
    if (byId("viewer").open) return; // reopened before this event
    byId("viewer-show").replaceChildren();
    const tile = this.#tiles.get(this.#shownId)?.querySelector("button") ?? byId("results-title");
    if (document.activeElement === document.body) tile.focus({ preventScroll: true });
    this.#shownId = null;
  }

  async #useAgain() {
    const job = this.#live.job(this.#shownId);
    if (!job) return;
    try {
      const whole = await complete(job);
      byId("viewer").close();
      this.#again(whole);
    } catch (problem) {
      write(byId("viewer-wrong"), problem.message);
    }
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

/** The live state has the first 300 characters of a prompt. */
async function complete(job) {
  return job.prompt.length < 300 ? job : parse(await (await ask("GET", `/v1/jobs/${job.id}`)).text());
}

function picture(job) {
  const [width, height] = job.size.split("x").map(Number);
  if (job.object !== "video") return make("img", { src: at(job.content_url), alt: job.prompt, width, height });
  const video = make("video", { src: at(job.content_url), poster: at(job.thumbnail_url), width, height });
  [video.controls, video.loop] = [true, true];
  [video.muted, video.playsInline, video.autoplay] = [true, true, !stillness.matches];
  video.setAttribute("aria-label", job.prompt);
  return video;
}

function ending(job) {
  const sign = job.status === "failed" ? "\u2717 Failed: " : "";
  return make("p", { class: `end ${job.status}` }, `${sign}${job.error?.message ?? `This job was ${job.status}.`}`);
}

function fact(name, value) {
  if (value === null || value === undefined) return [];
  return [make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))];
}
